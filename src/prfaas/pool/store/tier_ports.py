"""Interfaces of the store: a stored block, the tiers below memory, and observers of changes.

Memory asks the list of tiers, and no tier by its kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prfaas.core.cache.keep_rules import KeepRules, Origin, Scope
from prfaas.core.kv.blocks import BlockKey, BlockName, Layout
from prfaas.pool.store.origins import LOCAL


@dataclass(slots=True)
class StoredBlock:
    """A block at rest."""

    data: bytearray | memoryview
    """Its bytes; never changed once stored."""
    digest: bytes
    """BLAKE3 over name and bytes."""
    origin: Origin = LOCAL
    """Its origin."""
    pins: int = 0
    """Readers that need it to stay; a pinned block is not evicted."""


class StoreObserver(Protocol):
    """Observer of added and removed blocks in all tiers."""

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks can be found from now on."""

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks can no longer be found."""


class ReadBudget:
    """Time limit of all slow reads of one request together. It starts with the first read.

    Args:
        limit_s: Seconds; None is unlimited.
    """

    def __init__(
        self, limit_s: float | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s, self._clock_s = limit_s, clock_s
        self._ends_at_s: float | None = None

    @property
    def left_s(self) -> float | None:
        """Time that is left, seconds, at least 0; None is unlimited. The first call starts it."""
        if self._limit_s is None:
            return None
        now_s = self._clock_s()
        if self._ends_at_s is None:
            self._ends_at_s = now_s + self._limit_s
        return max(0.0, self._ends_at_s - now_s)


class TierOwner(Protocol):
    """The store above a tier."""

    rules: KeepRules

    def found_below(self, tier: LowerTier, names: Iterable[BlockName]) -> None:
        """A tier has blocks that this process did not write, or that it could not read before."""

    def gone_below(self, names: Iterable[BlockName]) -> None:
        """A tier no longer has these."""


class LowerTier(Protocol):
    """A tier below memory. Only `read` and `probe` wait."""

    label: str
    """Its name in metrics and reports."""

    @property
    def is_written_in_advance(self) -> bool:
        """Return True if blocks are offered to it shortly before memory evicts them, and not when
        they are stored."""
        ...

    def missed(self) -> None:
        """Memory evicted a block before this tier, which is written in advance, had written it."""

    def __contains__(self, name: BlockName) -> bool:
        """Return True if it is known to hold a block. The block may be gone when it is read."""
        ...

    def names(self) -> Iterator[BlockName]:
        """Blocks that it is known to hold."""
        ...

    def num_bytes(self, name: BlockName) -> int:
        """Size of a block that it holds."""
        ...

    def origin(self, name: BlockName) -> Origin:
        """Origin of a block that was read just now."""
        ...

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Ask it to write a block.

        It calls `done` later, from the event loop, when the bytes are no longer needed.

        Returns:
            False if it does not take the block; `done` is not called then.
        """
        ...

    async def read(self, name: BlockName, into: memoryview, budget: ReadBudget) -> bytes | None:
        """Read and check a block.

        Args:
            into: As long as the block.

        Returns:
            Its digest; None if it could not be read, in time or at all.
        """
        ...

    async def count(self, scope: Scope) -> tuple[set[BlockName], int]:
        """Known blocks of a scope, also those that its source wrote; and their bytes."""
        ...

    async def drop(self, scope: Scope) -> None:
        """Drop for good every block of a scope; in a shared tier those of the whole site.

        Raises:
            OSError: Not all could be marked on disk.
            TransferError: Not all could be read or deleted.
            ConfigError: The disk is still being read.
        """

    async def expire(self, names: Collection[BlockName]) -> int:
        """Remove those of some blocks that are too old; return their number."""
        ...

    async def probe(self, names: Collection[BlockName]) -> set[BlockName]:
        """Ask the tier itself for blocks; returns those of `names` that it holds.

        A shared tier may hold blocks that `__contains__` does not know of. Takes a fraction of a
        second at most.
        """
        ...

    @property
    def needs_probe(self) -> bool:
        """Return True if a probe could find more than `__contains__`."""
        ...

    async def run(self) -> None:
        """Find what is there, and write offered blocks, until cancelled."""

    async def close(self) -> None:
        """Write what waits, for a few seconds at most, and end. Follows the end of `run`."""

    def validate(self) -> None:
        """Check that the index equals the contents, and the sums; AssertionError if one does not
        hold."""


class TierList:
    """The tiers below memory, the fastest first.

    Args:
        rules: What is missed although a tier has it.

    Attributes:
        in_advance: The fastest tier that is written in advance; None without.
    """

    def __init__(self, rules: KeepRules) -> None:
        self._rules = rules
        self._tiers: list[LowerTier] = []
        self.in_advance: LowerTier | None = None

    def add(self, tier: LowerTier) -> None:
        """Have a tier below all others, from now on."""
        self._tiers.append(tier)
        if tier.is_written_in_advance and self.in_advance is None:
            self.in_advance = tier

    def __iter__(self) -> Iterator[LowerTier]:
        return iter(self._tiers)

    def find(self, name: BlockName) -> LowerTier | None:
        """The fastest tier that has a block, which is not too old."""
        for tier in self._tiers:
            if name in tier and self._rules.may_read(tier.origin(name)):
                return tier
        return None

    def offer(self, name: BlockName, block: StoredBlock) -> None:
        """Offer a new block to the tiers that take every block when it is stored."""
        for tier in self._tiers:
            if not tier.is_written_in_advance and tier.offer(name, block, partial(_unpin, block)):
                block.pins += 1


def _unpin(block: StoredBlock) -> None:
    block.pins -= 1


class SharedTier(LowerTier, Protocol):
    """A lower tier that all pool nodes of a site write and read.

    Blocks are encrypted before they leave the pool node. The tier is on another machine and fails
    on its own: while it does, it holds no blocks, as far as this interface shows.
    """

    capacity_bytes: int
    """Limit of what this node keeps in it; 0 if the tier limits itself."""

    @property
    def used_bytes(self) -> int:
        """Bytes in the tier that this node has written."""
        ...

    def __len__(self) -> int:
        """Number of blocks that can be read, of all nodes."""
        ...

    def learn(self, layout: Layout) -> None:
        """An engine of this node uses a layout from now on."""
