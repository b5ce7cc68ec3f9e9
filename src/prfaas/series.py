"""Series of Prometheus counters that exist before their first event, and the form of `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from prometheus_client import Counter

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
