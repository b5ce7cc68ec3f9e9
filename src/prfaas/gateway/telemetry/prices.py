"""Prices of a gateway's market: their metrics, what a decision cost, and changes by hand.

`prfaas ctl price` sets prices and revocations; a restart discards them.
"""

from __future__ import annotations

import math
import time
from typing import Annotated

import msgspec

from prfaas.core.market.choice import OfferChoice, Revocation, flat
from prfaas.core.market.market import Market
from prfaas.errors import RequestError
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.series import Families
from prfaas.units import NS_PER_S

_DIGITS = 8
_Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class MarketMetrics:
    """Prices of each cluster, and what was spent there."""

    def __init__(self, make: Families) -> None:
        self._cost = make.counter(
            "prefill_cost",
            "Cost of the prefills that were sent to a cluster, by the prices of that time, for "
            "compute and for bytes on its link",
            "cluster",
            "part",
        )
        self._sent = make.counter(
            "priced_prefills", "Prefills that were sent to a cluster with a price", "cluster"
        )
        self._price = make.gauge(
            "gpu_hour_price", "Price of one GPU of a cluster for one hour", "cluster"
        )
        self._leaves = make.gauge(
            "capacity_leaves_seconds",
            "Time until the capacity of a cluster is revoked; 0 is gone, NaN is not announced",
            "cluster",
        )
        self._shown: dict[tuple[str, str], float] = {}

    def show(self, market: Market | None) -> None:
        """Take over what the market counts; nothing without one."""
        if market is None:
            return
        now_ns = time.monotonic_ns()
        for name in market.prices:
            for part, sums in (("compute", market.gpu_cost), ("bytes", market.link_cost)):
                self._cost.labels(name, part).inc(self._more(name, part, sums[name]))
            self._sent.labels(name).inc(self._more(name, "sent", market.num_sent[name]))
            there = market.quote(name, now_ns)
            if there is None:
                continue
            self._price.labels(name).set(there.per_gpu_h)
            leaves_in_ns = there.leaves_in_ns
            leaves_s = math.nan if leaves_in_ns is None else max(leaves_in_ns, 0) / NS_PER_S
            self._leaves.labels(name).set(leaves_s)

    def _more(self, cluster: str, what: str, value: float) -> float:
        """Growth of a sum since it was shown last."""
        before = self._shown.get((cluster, what), 0.0)
        self._shown[cluster, what] = value
        return max(value - before, 0.0)


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


class PriceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/prices/CLUSTER`."""

    gpu_hour: _Price | None = None
    per_tb: _Price | None = None
    leaves_in_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    stays: bool = False


def change_price(market: Market | None, cluster: str, body: PriceBody) -> tuple[str, str]:
    """Apply a change; RequestError if there are no prices, no such cluster, or nothing to change.

    Returns:
        The terms before and after, in words.
    """
    if market is None:
        raise RequestError(
            "this deployment has no prices: set routing.plan, and [prices.CLUSTER], "
            'routing.price_file or routing.policy = "cost"',
            status=409,
        )
    if cluster not in market.prices:
        known = ", ".join(market.prices)
        raise RequestError(f"no cluster {cluster[:80]!r} has prices; known: {known}", status=404)
    if body.stays and body.leaves_in_s is not None:
        raise RequestError("a cluster either leaves or stays; give one of both")
    before, now_ns = _in_words(market, cluster), time.monotonic_ns()
    price = market.prices[cluster]
    if body.gpu_hour is not None:
        price = price._replace(gpu_hour=flat(body.gpu_hour))
    if body.per_tb is not None:
        price = price._replace(per_tb=flat(body.per_tb))
    market.set_price(cluster, price)
    if body.stays:
        market.revoke(cluster)
    elif body.leaves_in_s is not None:
        at_ns = now_ns + round(body.leaves_in_s * NS_PER_S)
        market.revoke(cluster, Revocation(now_ns, at_ns))
    return before, _in_words(market, cluster)


def _in_words(market: Market, cluster: str) -> str:
    """Terms of a cluster as of now, for people."""
    there = market.quote(cluster, time.monotonic_ns())
    if there is None:
        return "no price"
    words = f"{there.per_gpu_h:g} a GPU hour, {there.per_byte * 1e12:g} a TB"
    if there.leaves_in_ns is None:
        return words
    if there.leaves_in_ns <= 0:
        return f"{words}, revoked"
    return f"{words}, leaves in {there.leaves_in_ns / NS_PER_S:.0f} s"
