"""`prfaas ctl price`: prices and revocations by hand. A restart discards them."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec

from prfaas.core.market.choice import Revocation, flat
from prfaas.core.market.market import Market
from prfaas.errors import RequestError
from prfaas.units import NS_PER_S

_Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class PriceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/prices/CLUSTER`."""

    gpu_hour: _Price | None = None
    per_tb: _Price | None = None
    leaves_in_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    stays: bool = False


def change(market: Market | None, cluster: str, body: PriceBody) -> tuple[str, str]:
    """Apply a change.

    Returns:
        The terms before and after, in words.

    Raises:
        RequestError: There are no prices, no such cluster, or nothing to change.
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
    before, now_ns = in_words(market, cluster), time.monotonic_ns()
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
    return before, in_words(market, cluster)


def in_words(market: Market, cluster: str) -> str:
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
