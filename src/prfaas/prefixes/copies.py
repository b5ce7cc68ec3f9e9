"""Copies of a prompt's blocks to another pool by an operator's order, and their cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.hashes import Hashes
from prfaas.core.kv.prefix_index import PrefixIndex, Tier
from prfaas.core.kv.shipping import shipped_bytes
from prfaas.core.transfer.tickets import Prefix
from prfaas.errors import RequestError
from prfaas.gateway.telemetry.recent_names import Recent
from prfaas.units import BITS_PER_BYTE

POOL_TIERS = Tier.HOST | Tier.DISK


class CopyPools(Protocol):
    """The pool nodes of a deployment."""

    def names(self) -> list[str]:
        """Names of all pools."""
        ...

    def layouts(self, pool: str) -> Mapping[str, Layout]:
        """Layouts that a pool announced, by engine."""
        ...

    def link_up(self, source: str, destination: str) -> bool:
        """Return True if a transfer between two pools can begin."""
        ...


class LinkCost(NamedTuple):
    """Cost of bytes on a link, as of now."""

    bits_per_s: float
    """Rate of the link; 0 if unknown."""
    per_byte: float | None
    """Price of a byte; None without prices."""


class CopyOffer(NamedTuple):
    """A copy that could be made, and what it costs."""

    source: str
    """Pool that has the blocks."""
    destination: str
    """Pool that lacks them."""
    prefix: Prefix
    """Part of the prompt that the source has."""
    have_tokens: int
    """Part of it that the destination has."""
    num_bytes: int
    """KV bytes to move."""
    seconds: float | None
    """Time on the link, alone; None if its rate is not known."""
    price: float | None
    """Price of the bytes; None without prices."""

    def as_json(self) -> dict[str, object]:
        """The offer as the API shows it."""
        return {
            "source": self.source,
            "destination": self.destination,
            "tokens": self.prefix.num_tokens,
            "have_tokens": self.have_tokens,
            "num_bytes": self.num_bytes,
            "seconds": self.seconds,
            "price": self.price,
        }


def unknown_pool(pool: str, known: Sequence[str]) -> RequestError:
    """Return the refusal of an order for a pool that the deployment has not."""
    shown = ", ".join(known)
    return RequestError(f"there is no pool {pool[:80]!r}; known pools: {shown}", status=404)


class CopyOffers:
    """Finds where a prompt can be copied from, and the cost.

    Args:
        pools: Their layouts and links.
        cost_of: Returns the cost of bytes from one pool to another.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pools: CopyPools,
        cost_of: Callable[[str, str], LinkCost],
    ) -> None:
        self._index, self._pools, self._cost_of = index, pools, cost_of

    def find(self, recent: Recent, destination: str, source: str) -> CopyOffer:
        """Return the copy that brings the most of a prompt to a pool; RequestError if there is no
        such pool, or nothing that could be copied.

        Args:
            destination: Name of the pool.
            source: Pool to copy from; empty for the one with the most.
        """
        known = self._pools.names()
        for pool in (destination, source or destination):
            if pool not in known:
                raise unknown_pool(pool, known)
        sources = [
            pool
            for pool in ([source] if source else known)
            if pool != destination and self._pools.link_up(pool, destination)
        ]
        if not sources:
            raise RequestError(
                f"no link is up from {source or 'any pool'} to {destination}: links go from "
                "PrfaaS pools to PD pools, and between hosts of a cluster",
                status=409,
            )
        offers = [
            offer
            for layout in set(self._pools.layouts(destination).values())
            for offer in self._offers(recent, layout, sources, destination)
        ]
        best = max(offers, key=lambda offer: offer.prefix.num_tokens, default=None)
        if best is None:
            raise RequestError(
                f"of this prompt {destination} lacks nothing that {' or '.join(sources)} holds",
                status=409,
            )
        return best

    def _offers(
        self, recent: Recent, layout: Layout, sources: Sequence[str], destination: str
    ) -> list[CopyOffer]:
        hashes = Hashes(recent.hashes)
        num_tokens = len(hashes) * layout.tokens_per_hash + 1
        hits, _ = self._index.hits(layout, hashes, num_tokens, POOL_TIERS)
        have_tokens = hits.get(destination, 0)
        found = []
        for source in sources:
            final_tokens = hits.get(source, 0)
            if final_tokens <= have_tokens:
                continue
            prefix = Prefix(
                layout,
                hashes[: final_tokens // layout.tokens_per_hash],
                recent.tenant,
                recent.quality,
            )
            num_bytes = shipped_bytes(layout, have_tokens=have_tokens, final_tokens=final_tokens)
            rate, per_byte = self._cost_of(source, destination)
            found.append(
                CopyOffer(
                    source,
                    destination,
                    prefix,
                    have_tokens,
                    num_bytes,
                    num_bytes * BITS_PER_BYTE / rate if rate else None,
                    None if per_byte is None else num_bytes * per_byte,
                )
            )
        return found
