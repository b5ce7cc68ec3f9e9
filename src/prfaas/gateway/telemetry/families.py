"""Metrics of a gateway's registry, made by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from prfaas.membership.views import PartRegistry


class Families:
    """Makes the metrics of one registry; every name begins with `prfaas_`."""

    def __init__(self) -> None:
        self.registry = PartRegistry()

    def counter(self, name: str, what: str, *labels: str) -> Counter:
        """Return a new counter; Prometheus' format adds `_total` to its name."""
        return Counter(f"prfaas_{name}", what, labels, registry=self.registry)

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """Return a new gauge."""
        return Gauge(f"prfaas_{name}", what, labels, registry=self.registry)

    def histogram(
        self, name: str, what: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        """Return a new histogram; `buckets` are upper limits."""
        return Histogram(f"prfaas_{name}", what, labels, buckets=buckets, registry=self.registry)


def show_state(
    gauge: Gauge, *labels: str, states: Iterable[Enum], read: Callable[[], object]
) -> None:
    """Show 1 at the state that `read` returns on each scrape, the last label, and 0 at others."""
    for state in states:
        gauge.labels(*labels, state.value).set_function(partial(_is_at, read, state))


def _is_at(read: Callable[[], object], state: Enum) -> float:
    return float(read() is state)
