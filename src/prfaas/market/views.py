"""The market in `explain` and in the status of a gateway."""

from __future__ import annotations

from typing import Any

from prfaas.core.market.choice import OfferChoice
from prfaas.core.market.market import Market
from prfaas.units import NS_PER_S

JsonObject = dict[str, Any]
_DIGITS = 8


def costs_json(choice: OfferChoice | None) -> list[JsonObject]:
    """Every candidate of a decision with its cost, or what excluded it; empty without prices."""
    if choice is None:
        return []
    return [
        {
            "cluster": each.offer.cluster,
            "excluded": str(each.excluded) or None,
            "is_chosen": each is choice.best,
            "compute": round(each.gpu_cost, _DIGITS),
            "bytes": round(each.link_cost, _DIGITS),
            "time": round(each.time_cost, _DIGITS),
            "cost": round(each.total, _DIGITS),
            "gpu_hour": each.per_gpu_h,
        }
        for each in choice.costed
    ]


def prices_json(market: Market | None, now_ns: int) -> list[JsonObject]:
    """Prices of all clusters as of now, and what was spent there; empty without prices."""
    if market is None:
        return []
    shown = []
    for name in market.prices:
        there = market.quote(name, now_ns)
        if there is None:
            continue
        leaves_in_ns = there.leaves_in_ns
        shown.append(
            {
                "cluster": name,
                "gpu_hour": there.per_gpu_h,
                "per_tb": round(there.per_byte * 10**12, _DIGITS),
                "leaves_in_s": None if leaves_in_ns is None else leaves_in_ns / NS_PER_S,
                "num_requests": market.num_sent[name],
                "compute_cost": round(market.gpu_cost[name], _DIGITS),
                "bytes_cost": round(market.link_cost[name], _DIGITS),
            }
        )
    return shown
