"""Orders of offers, for comparisons with the market's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from prfaas.core.market.choice import Costed, total

Order = Callable[[Costed], float]


def per_gpu_hour(costed: Costed) -> float:
    """Cheapest first: the lowest price of a GPU hour, among the clusters in time."""
    return costed.per_gpu_h


def time_to_first_token(costed: Costed) -> float:
    """Fastest first: the shortest predicted time to first token."""
    return float(costed.offer.ttft_ns or 0)


def money(costed: Costed) -> float:
    """Least money, among the clusters in time: a second of a request is worth nothing."""
    return costed.money


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "cost": total,
        "cheapest first": per_gpu_hour,
        "fastest first": time_to_first_token,
        "least money": money,
    }
)
