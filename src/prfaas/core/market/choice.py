"""The choice of the cluster of least cost. Pure; gateway, simulator and planner share it.

    cost = price of an instance x T(new tokens there) + price of a byte x bytes
         + value of a second x predicted time to first token

over the clusters that may be used, are ready, and are in time. The PD cluster is one of them. Where
all that could serve a request are late, the least late is chosen, and of those that are about
equally late the one of least cost.

Prices of a cluster by the time of day, and the times at which its capacity leaves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from prfaas.units import BYTES_PER_TB, NS_PER_S

NS_PER_H = 3600 * NS_PER_S
DAY_NS = 24 * NS_PER_H


class Tariff(NamedTuple):
    """A price that changes at fixed times of each day."""

    starts_ns: tuple[int, ...]
    """Start of each period, ns since midnight, rising."""
    prices: tuple[float, ...]
    """Price of each period; the last one lasts until the first start of the next day."""

    def at(self, wall_ns: int) -> float:
        """Price at a time, ns since a midnight."""
        if len(self.prices) == 1:
            return self.prices[0]
        return self.prices[bisect_right(self.starts_ns, wall_ns % DAY_NS) - 1]


def flat(price: float) -> Tariff:
    """A price that does not change."""
    return Tariff((0,), (price,))


class PlannedSite(NamedTuple):
    """A cluster as a plan has it."""

    gpus: int
    gpu_hour: float
    """Price of one GPU for one hour."""
    per_tb: float = 0.0
    """Price of 10**12 bytes on its link."""
    rtt_ns: int = 0
    """Round trip of its link; 0 for the PD cluster."""


class SitePrice(NamedTuple):
    """Prices of a cluster."""

    gpu_hour: Tariff
    per_tb: Tariff = Tariff((0,), (0.0,))
    """10**12 bytes on its link to the PD cluster; 0 for the PD cluster."""
    gpus: int = 1
    notice_ns: int | None = None
    """Notice before its capacity is revoked; None is capacity that stays."""
    gb_hour: Tariff = Tariff((0,), (0.0,))
    """10**9 bytes in its pool nodes for one hour."""
    watts: float = 0.0
    """Power of an instance while it works; 0 is unknown."""


class Revocation(NamedTuple):
    """Capacity of a cluster that leaves; times on the clock of the market, ns."""

    known_at_ns: int
    """Time of the notice."""
    at_ns: int
    """It is gone from here on."""
    until_ns: int | None = None
    """It is back; None is not known."""


class Quote(NamedTuple):
    """Terms of a cluster at one time."""

    per_gpu_h: float
    """Price of one GPU for one hour."""
    per_instance_ns: float
    """Price of an instance for 1 ns."""
    per_byte: float
    """Price of a byte on its link."""
    leaves_in_ns: int | None = None
    """Time until its capacity is revoked, as announced; 0 or less is gone, None is not
    announced."""
    notice_ns: int | None = None
    """As in `SitePrice`."""


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


class Exclusion(StrEnum):
    """Reason of the market against a cluster; others are those of routing."""

    NOT_PREDICTED = "not_predicted"
    """No fresh report of its queues or of its link, or no profile."""
    NO_PRICE = "no_price"
    REVOKED = "revoked"
    LEAVES_FIRST = "leaves_first"
    """Its capacity leaves before the blocks of the request would have arrived."""
    NOTICE_TOO_SHORT = "notice_too_short"
    """The request would take longer than the notice before a revocation."""
    LATE = "predicted_late"


class ClusterOffer(NamedTuple):
    """A cluster that could prefill a request."""

    cluster: str
    work_ns: int
    """Prefill of an instance there: T of the new tokens."""
    num_bytes: int
    ttft_ns: int | None
    """Predicted time to first token; None is unknown."""
    remote_ns: int = 0
    """Time until nothing of the request is in the cluster any more; 0 for the PD cluster."""
    excluded: str = ""
    """Reason against it that is known already; "" is none."""


class RequestTerms(NamedTuple):
    """Terms of a request."""

    second_price: float = 0.0
    """Value of a second of its time."""
    ttft_max_ns: int | None = None
    """Target of its time to first token; None is no target."""


class Costed(NamedTuple):
    """An offer with its cost, in the currency of the prices."""

    offer: ClusterOffer
    gpu_cost: float
    link_cost: float
    """Bytes."""
    time_cost: float
    """Time to first token."""
    per_gpu_h: float
    """Price of one GPU for one hour there."""
    excluded: str
    """Reason against it; "" is none."""

    @property
    def total(self) -> float:
        """The quantity that is minimised."""
        return self.gpu_cost + self.link_cost + self.time_cost

    @property
    def money(self) -> float:
        """Part of it that is paid."""
        return self.gpu_cost + self.link_cost


class OfferChoice(NamedTuple):
    """The chosen offer, and all others."""

    best: Costed | None
    """The chosen one, late or not; None where all are excluded for other reasons."""
    costed: tuple[Costed, ...]
    """All, the PD cluster's first."""


def total(costed: Costed) -> float:
    """The order of the market."""
    return costed.total


def choose(
    offers: Sequence[ClusterOffer],
    quotes: Mapping[str, Quote],
    terms: RequestTerms,
    incumbent: str = "",
    hysteresis: float = 0.0,
    order: Callable[[Costed], float] = total,
) -> OfferChoice:
    """Choose the offer of least cost.

    Args:
        offers: Of all clusters, the PD cluster's first.
        quotes: Terms of the clusters by name.
        incumbent: Cluster of the last request like this one; another one has to be cheaper by
            `hysteresis`, so that a small crossing of prices changes nothing.
        hysteresis: That gain, as a share of the incumbent's cost, in [0, 1). Of offers that are
            all late, those within this share of the least predicted time count as equally late.
        order: What is minimised; other orders are for comparisons.
    """
    costed = tuple(cost(offer, quotes.get(offer.cluster), terms) for offer in offers)
    best: Costed | None = None
    stays: Costed | None = None
    for each in costed:
        if each.excluded:
            continue
        if best is None or order(each) < order(best):
            best = each
        if each.offer.cluster == incumbent:
            stays = each
    if best is None:
        best = _least_late(costed, hysteresis, order)
    elif stays is not None and order(stays) * (1 - hysteresis) <= order(best):
        best = stays
    return OfferChoice(best, costed)


def _least_late(
    costed: Sequence[Costed], hysteresis: float, order: Callable[[Costed], float]
) -> Costed | None:
    """The best of those that are excluded because they are late, and for nothing else."""
    late = [
        (each.offer.ttft_ns, each)
        for each in costed
        if each.excluded == Exclusion.LATE and each.offer.ttft_ns is not None
    ]
    if not late:
        return None
    least_ns = min(ttft_ns for ttft_ns, _ in late)
    alike = (each for ttft_ns, each in late if ttft_ns * (1 - hysteresis) <= least_ns)
    return min(alike, key=order)


def cost(offer: ClusterOffer, terms_there: Quote | None, terms: RequestTerms) -> Costed:
    """The cost of an offer, or the reason against it."""
    if terms_there is None:
        return Costed(offer, 0.0, 0.0, 0.0, 0.0, offer.excluded or Exclusion.NO_PRICE)
    ttft_ns = offer.ttft_ns
    return Costed(
        offer,
        offer.work_ns * terms_there.per_instance_ns,
        offer.num_bytes * terms_there.per_byte,
        0.0 if ttft_ns is None else ttft_ns * terms.second_price / NS_PER_S,
        terms_there.per_gpu_h,
        offer.excluded or _excluded(offer, terms_there, terms),
    )


def _excluded(offer: ClusterOffer, there: Quote, terms: RequestTerms) -> str:
    """Reason of the market against an offer; "" is none."""
    ttft_ns, leaves_in_ns = offer.ttft_ns, there.leaves_in_ns
    if ttft_ns is None:
        return Exclusion.NOT_PREDICTED
    if leaves_in_ns is not None:
        if leaves_in_ns <= 0:
            return Exclusion.REVOKED
        if offer.remote_ns >= leaves_in_ns:
            return Exclusion.LEAVES_FIRST
    if there.notice_ns is not None and offer.remote_ns > there.notice_ns:
        return Exclusion.NOTICE_TOO_SHORT
    if terms.ttft_max_ns is not None and ttft_ns > terms.ttft_max_ns:
        return Exclusion.LATE
    return ""
