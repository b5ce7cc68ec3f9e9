"""Which pool holds which blocks, and how much of a prompt it can serve.

The index is fed by ordered event streams, one per pool. When a stream breaks or has a gap, what was
known of the pool is no longer certain: it counts as no hit, and only draws requests to the pool,
until a new snapshot begins. During a snapshot the pool counts as empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum

from prfaas.core.blocks import BlockKey, CacheGroup, GroupKind, Layout, block_key


class SourceState(StrEnum):
    """How far the index may trust what it knows of a pool."""

    EXACT = "exact"
    INCOMPLETE = "incomplete"
    """The pool holds more than the index remembers: a hit is at least what the index says."""
    DEGRADED = "degraded"
    """The stream broke: what the pool held then is a hint."""
    REBUILDING = "rebuilding"
    """Waiting for a snapshot, or in the middle of one."""

    @property
    def is_live(self) -> bool:
        """Whether every event was heard, so that a hit is certain."""
        return self in (SourceState.EXACT, SourceState.INCOMPLETE)


class Tier(IntFlag):
    """Where a block lies; it may lie in several tiers."""

    HOST = 1
    DISK = 2
    ANY = 3


NUM_BLOCKS_MAX = 4_000_000
"""Blocks of one pool that are remembered."""


@dataclass(slots=True)
class _Source:
    state: SourceState = SourceState.REBUILDING
    full: bool = False
    tiers: dict[tuple[bytes, BlockKey], int] = field(default_factory=dict)
    """Flags of `Tier` as plain numbers, which cost a tenth to look at."""


class PrefixIndex:
    """Blocks by pool and tier.

    Args:
        num_blocks_max: Blocks of one pool that are remembered. Of a pool with more some are not
            known, and it counts as INCOMPLETE until its next snapshot.
    """

    def __init__(self, num_blocks_max: int = NUM_BLOCKS_MAX) -> None:
        self._num_blocks_max = num_blocks_max
        self._sources: dict[str, _Source] = {}

    def begin_snapshot(self, pool: str) -> None:
        """Forget what is known of `pool`; it counts as empty until `end_snapshot`."""
        self._sources[pool] = _Source()

    def end_snapshot(self, pool: str) -> None:
        """All blocks of the snapshot were added: trust the pool from here on."""
        source = self._source(pool)
        source.state = SourceState.INCOMPLETE if source.full else SourceState.EXACT

    def lose(self, pool: str) -> None:
        """The event stream of `pool` broke; half a snapshot is worth nothing."""
        source = self._source(pool)
        if source.state is SourceState.REBUILDING:
            self._sources[pool] = _Source()
        else:
            source.state = SourceState.DEGRADED

    def add(
        self, pool: str, layout_id: bytes, keys: Iterable[BlockKey], tier: Tier = Tier.HOST
    ) -> None:
        """`pool` stored blocks in a tier. Adding one twice is harmless."""
        source = self._source(pool)
        tiers, flags = source.tiers, int(tier)
        for key in keys:
            block = (layout_id, key)
            if block in tiers:
                tiers[block] |= flags
            elif len(tiers) < self._num_blocks_max:
                tiers[block] = flags
            else:
                self._overflow(source)

    def remove(
        self, pool: str, layout_id: bytes, keys: Iterable[BlockKey], tier: Tier = Tier.ANY
    ) -> None:
        """`pool` dropped blocks from a tier. Removing an unknown one is harmless."""
        tiers, flags = self._source(pool).tiers, int(tier)
        for key in keys:
            block = (layout_id, key)
            left = tiers.get(block, flags) & ~flags
            if left:
                tiers[block] = left
            else:
                tiers.pop(block, None)

    def state(self, pool: str) -> SourceState:
        """How far `pool` is known."""
        return self._source(pool).state

    def num_blocks(self, pool: str) -> int:
        """Blocks that `pool` is known to hold."""
        return len(self._source(pool).tiers)

    def usable_hit(
        self,
        pool: str,
        layout: Layout,
        hashes: list[bytes],
        num_tokens: int,
        tiers: Tier = Tier.ANY,
    ) -> int:
        """Longest prefix of a prompt that every cache group of `pool` can serve.

        Args:
            pool: Name of the pool.
            layout: Layout that the prompt's engine uses.
            hashes: Hash chain of the prompt.
            num_tokens: Length of the prompt, tokens.
            tiers: Blocks count that lie in one of these.

        Returns:
            Tokens, a multiple of `layout.boundary_tokens`, below `num_tokens`; 0 if the pool is
            DEGRADED or REBUILDING. Costs one lookup per block of the prompt.
        """
        source = self._source(pool)
        return _longest(source, tiers, layout, hashes, num_tokens) if source.state.is_live else 0

    def hint(self, pool: str, layout: Layout, hashes: list[bytes], num_tokens: int) -> int:
        """What `usable_hit` would say of a DEGRADED pool if nothing had changed; else 0."""
        source = self._source(pool)
        degraded = source.state is SourceState.DEGRADED
        return _longest(source, Tier.ANY, layout, hashes, num_tokens) if degraded else 0

    @staticmethod
    def _overflow(source: _Source) -> None:
        source.full = True
        if source.state is SourceState.EXACT:
            source.state = SourceState.INCOMPLETE

    def _source(self, pool: str) -> _Source:
        return self._sources.setdefault(pool, _Source())


@dataclass(frozen=True, slots=True)
class _Held:
    """The blocks of one pool, seen from one prompt."""

    blocks: Mapping[tuple[bytes, BlockKey], int]
    tiers: int
    layout: Layout
    hashes: list[bytes]

    def has(self, group: CacheGroup, end_token: int) -> bool:
        key = block_key(self.layout, group, self.hashes, end_token)
        return bool(self.blocks.get((self.layout.layout_id, key), 0) & self.tiers)

    def leading_run(self, group: CacheGroup, limit: int) -> int:
        """Tokens covered by the group's unbroken run of blocks from the start, up to `limit`."""
        covered = 0
        while covered + group.tokens_per_block <= limit and self.has(
            group, covered + group.tokens_per_block
        ):
            covered += group.tokens_per_block
        return covered

    def covers(self, group: CacheGroup, boundary: int) -> bool:
        """Whether a state or window group can resume at `boundary`."""
        if group.kind is GroupKind.LINEAR_STATE:
            return self.has(group, boundary)
        first = max(0, boundary - group.window_tokens)
        span = group.tokens_per_block
        return all(self.has(group, end) for end in range(boundary, first // span * span, -span))


def _longest(
    source: _Source, tiers: Tier, layout: Layout, hashes: list[bytes], num_tokens: int
) -> int:
    """Longest prefix that every cache group can serve, tokens."""
    if not hashes:
        return 0
    held = _Held(source.tiers, int(tiers), layout, hashes)
    limit = layout.last_boundary(num_tokens)
    for group in layout.groups:
        if group.kind is GroupKind.FULL_ATTENTION:
            limit = held.leading_run(group, limit)
    boundary = limit // layout.boundary_tokens * layout.boundary_tokens
    others = [group for group in layout.groups if group.kind is not GroupKind.FULL_ATTENTION]
    while boundary > 0 and not all(held.covers(group, boundary) for group in others):
        boundary -= layout.boundary_tokens
    return boundary
