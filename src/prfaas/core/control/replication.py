"""Selection of hot prefixes to copy to a pool that often misses them.

Seconds of prefill that a copy is expected to save against bytes on a link, within a budget. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import exp2
from typing import Generic, TypeVar

from prfaas.core.routing.predictions import CostModel, LinkState
from prfaas.units import BITS_PER_BYTE, NS_PER_S

NUM_COPIES_MAX = 64
"""Limit per interval."""


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Settings of copies of hot prefixes."""

    budget_bytes: int
    """At most so many in one interval, for each destination."""
    half_life_ns: int = 60 * NS_PER_S
    """Time in which a count halves; what is expected to be used in the future is what was used
    within about as long."""
    num_uses_min: float = 2.0
    """Decayed uses below which nothing is copied."""
    num_candidates_max: int = 10_000
    """Limit of counted prefixes; the coldest are dropped."""


BlockId = TypeVar("BlockId", int, bytes)
"""Name of a block; it names everything before it too."""


@dataclass(frozen=True, slots=True)
class Copy(Generic[BlockId]):
    """Blocks to copy."""

    block_ids: Sequence[BlockId]
    num_present: int
    """Leading blocks of it that are there already."""
    num_bytes: int


@dataclass(slots=True)
class _Demand(Generic[BlockId]):
    """A prefix: the first `length` of `block_ids`."""

    block_ids: Sequence[BlockId]
    length: int
    num_present: int = 0
    num_bytes: int = 0
    uses: float = 0.0
    saved_ns: float = 0.0
    """Saving of one use, from the last use."""
    counted_at_ns: int = 0

    def uses_at(self, now_ns: int, half_life_ns: int) -> float:
        return self.uses * exp2((self.counted_at_ns - now_ns) / half_life_ns)

    def begins(self, other: _Demand[BlockId]) -> bool:
        """Return True if it is a beginning of another one; an id names everything before it."""
        return (
            self.length <= other.length
            and other.block_ids[self.length - 1] == self.block_ids[self.length - 1]
        )


class HotPrefixes(Generic[BlockId]):
    """Prefixes that one pool misses and another has: counts, and what is worth copying."""

    def __init__(self, settings: CopySettings) -> None:
        self._settings = settings
        self._demands: dict[BlockId, _Demand[BlockId]] = {}

    def __len__(self) -> int:
        return len(self._demands)

    def miss(
        self,
        block_ids: Sequence[BlockId],
        length: int,
        num_present: int,
        *,
        num_bytes: int,
        saved_ns: int,
        now_ns: int,
    ) -> None:
        """A request had to compute a prefix that another pool holds.

        Args:
            block_ids: Of the prompt; each names everything before it.
            length: Of the prefix, blocks, at least 1.
            num_present: Leading blocks of it that are there already.
            num_bytes: To move the others.
            saved_ns: Prefill time that they would have saved.
        """
        key = block_ids[length - 1]
        demand = self._demands.get(key)
        if demand is None:
            self._make_room(now_ns)
            demand = self._demands[key] = _Demand(block_ids, length)
        demand.uses = demand.uses_at(now_ns, self._settings.half_life_ns) + 1
        demand.num_present, demand.num_bytes = num_present, num_bytes
        demand.saved_ns, demand.counted_at_ns = saved_ns, now_ns

    def choose(
        self, link: LinkState | None, now_ns: int, ns_per_byte: float = 0.0
    ) -> list[Copy[BlockId]]:
        """Return the copies of this interval; the counts of selected prefixes and their beginnings
        restart.

        A copy is chosen when the expected saving exceeds the time on the link and the worth of
        the bytes, most gain first, within the budget; of prefixes that begin alike one at a time.
        Nothing while the link is not known or has a backlog longer than the budget.

        Args:
            link: From the pool that has them; None is unknown.
            ns_per_byte: Worth of a byte, as time.
        """
        if link is None or not link.bits_per_s or link.backlog_bytes > self._settings.budget_bytes:
            return []
        left, chosen = self._settings.budget_bytes, list[_Demand[BlockId]]()
        for _, key, demand in sorted(
            self._worthwhile(link.bits_per_s, now_ns, ns_per_byte), key=lambda entry: entry[:2]
        ):
            if any(demand.begins(other) for other in chosen):
                del self._demands[key]
            elif demand.num_bytes <= left and not any(other.begins(demand) for other in chosen):
                left -= demand.num_bytes
                chosen.append(demand)
                del self._demands[key]
            if len(chosen) == NUM_COPIES_MAX:
                break
        return [Copy(d.block_ids[: d.length], d.num_present, d.num_bytes) for d in chosen]

    def _worthwhile(
        self, bits_per_s: float, now_ns: int, ns_per_byte: float
    ) -> Iterator[tuple[float, BlockId, _Demand[BlockId]]]:
        """Negative gain, name and demand of every prefix that is worth its bytes."""
        for key, demand in self._demands.items():
            uses = demand.uses_at(now_ns, self._settings.half_life_ns)
            saved = uses * demand.saved_ns
            sent_ns = demand.num_bytes * BITS_PER_BYTE * NS_PER_S / max(bits_per_s, 1.0)
            cost = sent_ns + demand.num_bytes * ns_per_byte
            if uses >= self._settings.num_uses_min and saved > cost:
                yield cost - saved, key, demand

    def _make_room(self, now_ns: int) -> None:
        """Drop the coldest tenth when there are too many."""
        if len(self._demands) < self._settings.num_candidates_max:
            return
        half_life_ns = self._settings.half_life_ns
        coldest = nsmallest(
            max(len(self._demands) // 10, 1),
            self._demands,
            key=lambda key: (self._demands[key].uses_at(now_ns, half_life_ns), key),
        )
        for key in coldest:
            del self._demands[key]


@dataclass(frozen=True, slots=True)
class CopiedPrompt(Generic[BlockId]):
    """A prompt whose beginnings may be copied."""

    block_ids: Sequence[BlockId]
    """Each names everything before it."""
    num_tokens: int
    block_tokens: int
    has_state: bool
    """The model has linear state, which lies only at the end of what a pool holds."""
    bytes_between: Callable[[int, int], int]
    """KV bytes to one length from another, tokens."""


LinkName = tuple[str, str]
"""Source and destination pool."""


class Replication(Generic[BlockId]):
    """Prefixes that PD pools miss and PrfaaS pools hold, by link, and which of them are copied.

    Nothing is copied the other way: PD pool nodes keep no links to PrfaaS pools.

    Args:
        settings: Budget of each link, and decay.
    """

    def __init__(self, settings: CopySettings) -> None:
        self._settings = settings
        self._hot: dict[LinkName, HotPrefixes[BlockId]] = {}

    @property
    def links(self) -> Sequence[LinkName]:
        """Links over which something was missed."""
        return list(self._hot)

    def missed(
        self,
        link: LinkName,
        prompt: CopiedPrompt[BlockId],
        present_tokens: int,
        held_tokens: int,
        costs: CostModel,
        now_ns: int,
    ) -> None:
        """A prompt was prefilled in the PD cluster, of which a PrfaaS pool holds more.

        Args:
            link: From that pool to the PD pool.
            present_tokens: Prefix that the PD pool has.
            held_tokens: Prefix that the PrfaaS pool has.
        """
        span, prefill_ns = prompt.block_tokens, costs.local_prefill_ns
        present = present_tokens // span
        lengths = list(marks(prompt.block_ids, present, held_tokens // span))
        hot = self._hot.setdefault(link, HotPrefixes(self._settings))
        held = present * span
        whole_ns = prefill_ns(prompt.num_tokens - held, held)
        for length in lengths[-1:] if prompt.has_state else lengths:
            rest_ns = prefill_ns(prompt.num_tokens - length * span, length * span)
            hot.miss(
                prompt.block_ids[:length],
                length,
                present,
                num_bytes=prompt.bytes_between(length * span, held),
                saved_ns=whole_ns - rest_ns,
                now_ns=now_ns,
            )

    def choose(
        self, link: LinkName, state: LinkState | None, ns_per_byte: float, now_ns: int
    ) -> list[Copy[BlockId]]:
        """Return what is copied over a link in this interval; see `HotPrefixes.choose`."""
        hot = self._hot.get(link)
        return [] if hot is None else hot.choose(state, now_ns, ns_per_byte)


def marks(block_ids: Sequence[BlockId], present: int, held: int) -> Iterator[int]:
    """Lengths, in blocks, at which a prefix is counted: powers of two, and all that is held.

    So a common beginning of different prompts is found in O(log n) counts a request.

    Args:
        present: Leading blocks that the pool has.
        held: Leading blocks that the other pool has.
    """
    end = min(held, len(block_ids))
    length = 1
    while length < end:
        if length > present:
            yield length
        length *= 2
    if end > present:
        yield end
