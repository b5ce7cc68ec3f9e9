"""Prices of a cluster by the time of day, and the times at which its capacity leaves."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from prfaas.units import BYTES_PER_TB, NS_PER_S

NS_PER_H = 3600 * NS_PER_S
DAY_NS = 24 * NS_PER_H


class Tariff(NamedTuple):
    """A price that changes at fixed times of each day.

    Attributes:
        starts_ns: Start of each period, ns since midnight, rising.
        prices: Price of each period; the last one lasts until the first start of the next day.
    """

    starts_ns: tuple[int, ...]
    prices: tuple[float, ...]

    def at(self, wall_ns: int) -> float:
        """Price at a time, ns since a midnight."""
        if len(self.prices) == 1:
            return self.prices[0]
        return self.prices[bisect_right(self.starts_ns, wall_ns % DAY_NS) - 1]


def flat(price: float) -> Tariff:
    """A price that does not change."""
    return Tariff((0,), (price,))


class SitePrice(NamedTuple):
    """Prices of a cluster.

    Attributes:
        per_tb: 10**12 bytes on its link to the PD cluster; 0 for the PD cluster.
        notice_ns: Notice before its capacity is revoked; None is capacity that stays.
        gb_hour: 10**9 bytes in its pool nodes for one hour.
        watts: Power of an instance while it works; 0 is unknown.
    """

    gpu_hour: Tariff
    per_tb: Tariff = Tariff((0,), (0.0,))
    gpus: int = 1
    notice_ns: int | None = None
    gb_hour: Tariff = Tariff((0,), (0.0,))
    watts: float = 0.0


class Revocation(NamedTuple):
    """Capacity of a cluster that leaves; times on the clock of the market, ns.

    Attributes:
        known_at_ns: Time of the notice.
        at_ns: It is gone from here on.
        until_ns: It is back; None is not known.
    """

    known_at_ns: int
    at_ns: int
    until_ns: int | None = None


class Quote(NamedTuple):
    """Terms of a cluster at one time.

    Attributes:
        per_gpu_h: Price of one GPU for one hour.
        per_instance_ns: Price of an instance for 1 ns.
        per_byte: Price of a byte on its link.
        leaves_in_ns: Time until its capacity is revoked, as announced; 0 or less is gone, None is
            not announced.
        notice_ns: As in `SitePrice`.
    """

    per_gpu_h: float
    per_instance_ns: float
    per_byte: float
    leaves_in_ns: int | None = None
    notice_ns: int | None = None


def quote(price: SitePrice, revoked: tuple[Revocation, ...], now_ns: int, wall_ns: int) -> Quote:
    """Terms of a cluster.

    Args:
        now_ns: Time on the clock of the market.
        wall_ns: The same time, ns since a midnight.
    """
    per_gpu_h, per_tb = price.gpu_hour.at(wall_ns), price.per_tb.at(wall_ns)
    leaves = [
        each.at_ns - now_ns
        for each in revoked
        if each.known_at_ns <= now_ns and (each.until_ns is None or now_ns < each.until_ns)
    ]
    return Quote(
        per_gpu_h,
        per_gpu_h * price.gpus / NS_PER_H,
        per_tb / BYTES_PER_TB,
        min(leaves, default=None),
        price.notice_ns,
    )
