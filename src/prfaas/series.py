"""Metrics of Prometheus: their making, series that exist before their first event, the form."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of `/metrics` of every part."""


def at_zero(counter: Counter, *labels: Iterable[str]) -> Counter:
    """Make the series of a counter whose labels have few possible values.

    `increase` and `rate` do not see the first event of a series that begins with it, so an alert
    on the first one would not fire.

    Args:
        counter: Its labels are all of a bounded set.
        labels: Possible values of each label, in their order.
    """
    for values in product(*labels):
        counter.labels(*values)
    return counter


class Families:
    """Makes the metrics of one registry; every name begins with `prfaas_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, what: str, *labels: str) -> Counter:
        """Return a new counter; Prometheus' format adds `_total` to its name."""
        return Counter(f"prfaas_{name}", what, labels, registry=self._registry)

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """Return a new gauge."""
        return Gauge(f"prfaas_{name}", what, labels, registry=self._registry)

    def histogram(
        self, name: str, what: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        """Return a new histogram; `buckets` are upper limits."""
        return Histogram(f"prfaas_{name}", what, labels, buckets=buckets, registry=self._registry)
