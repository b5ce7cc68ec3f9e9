"""The market of a deployment: prices as of now, who was chosen last, and what was spent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prfaas.core.market.choice import (
    ClusterOffer,
    Costed,
    OfferChoice,
    Quote,
    RequestTerms,
    Revocation,
    SitePrice,
    choose,
    quote,
    total,
)

HYSTERESIS = 0.05
REVOCATIONS_MAX = 100
"""Revocations of a cluster that are remembered; the oldest is forgotten first."""


class Market:
    """Prices, revocations, incumbents and sums.

    Args:
        prices: By cluster, the PD cluster's too.
        hysteresis: As in `choose`.
        wall_ns: Time of day, ns since midnight, at 0 of the clock of the caller.
    """

    def __init__(
        self, prices: Mapping[str, SitePrice], hysteresis: float = HYSTERESIS, wall_ns: int = 0
    ) -> None:
        self.prices, self.hysteresis, self.wall_ns = dict(prices), hysteresis, wall_ns
        self.order: Callable[[Costed], float] = total
        """The quantity that is minimised; another order is a comparison policy."""
        self.revocations: dict[str, tuple[Revocation, ...]] = {}
        self.gpu_cost = dict.fromkeys(prices, 0.0)
        """Compute of the requests that were sent to each cluster, by the prices of that time."""
        self.link_cost = dict.fromkeys(prices, 0.0)
        """The same of the bytes on its link."""
        self.num_sent = dict.fromkeys(prices, 0)
        self._incumbents: dict[tuple[RequestTerms, int], str] = {}

    def quote(self, cluster: str, now_ns: int) -> Quote | None:
        """Terms of a cluster as of now; None without a price."""
        price = self.prices.get(cluster)
        if price is None:
            return None
        return quote(price, self.revocations.get(cluster, ()), now_ns, now_ns + self.wall_ns)

    def set_price(self, cluster: str, price: SitePrice) -> None:
        """Set the prices of a cluster from now on."""
        self.prices[cluster] = price
        for sums in (self.gpu_cost, self.link_cost, self.num_sent):
            sums.setdefault(cluster, 0)

    def revoke(self, cluster: str, *revocations: Revocation) -> None:
        """Announce when the capacity of a cluster leaves; without any, it stays."""
        self.revocations[cluster] = revocations[-REVOCATIONS_MAX:]

    def consider(
        self, offers: Sequence[ClusterOffer], terms: RequestTerms, num_new_tokens: int, now_ns: int
    ) -> OfferChoice:
        """Choose for a request; nothing is remembered.

        Args:
            offers: The PD cluster's first.
            num_new_tokens: Its new tokens in the PD cluster: requests of about this length have
                one incumbent.
        """
        quotes = {
            offer.cluster: found
            for offer in offers
            if (found := self.quote(offer.cluster, now_ns)) is not None
        }
        incumbent = self._incumbents.get((terms, num_new_tokens.bit_length()), "")
        return choose(offers, quotes, terms, incumbent, self.hysteresis, self.order)

    def chosen(self, choice: OfferChoice, terms: RequestTerms, num_new_tokens: int) -> None:
        """A request took the best offer: if in time, it is the incumbent of requests like this."""
        if choice.best is not None and not choice.best.excluded:
            key = terms, num_new_tokens.bit_length()
            self._incumbents[key] = choice.best.offer.cluster

    def spend(self, cluster: str, work_ns: int, num_bytes: int, link: str, now_ns: int) -> None:
        """A prefill was sent to a cluster.

        Args:
            num_bytes: Bytes on the link of `link`.
            link: PrfaaS cluster at the end of that link.
        """
        there = self.quote(cluster, now_ns)
        if there is not None:
            self.gpu_cost[cluster] += work_ns * there.per_instance_ns
            self.num_sent[cluster] += 1
        if num_bytes and (over := self.quote(link, now_ns)) is not None:
            self.link_cost[link] += num_bytes * over.per_byte

    @property
    def spent(self) -> float:
        """All that was spent."""
        return sum(self.gpu_cost.values()) + sum(self.link_cost.values())
