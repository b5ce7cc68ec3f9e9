"""Which pool holds which blocks, and how much of a prompt it can serve.

The index is fed by ordered event streams, one per pool. When a stream breaks or has a gap, what was
known of the pool is no longer certain: it counts as no hit, and only draws requests to the pool,
until a new snapshot begins. During a snapshot the pool counts as empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.core.blocks import BlockKey, CacheGroup, GroupKind, Layout, block_key


class SourceState(StrEnum):
    """How far the index may trust what it knows of a pool."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """The stream broke: what the pool held then is a hint."""
    REBUILDING = "rebuilding"
    """Waiting for a snapshot, or in the middle of one."""


@dataclass(slots=True)
class _Source:
    state: SourceState = SourceState.REBUILDING
    blocks: set[tuple[bytes, BlockKey]] = field(default_factory=set)


class PrefixIndex:
    """Blocks by pool."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def begin_snapshot(self, pool: str) -> None:
        """Forget what is known of `pool`; it counts as empty until `end_snapshot`."""
        self._sources[pool] = _Source()

    def end_snapshot(self, pool: str) -> None:
        """All blocks of the snapshot were added: trust the pool from here on."""
        self._source(pool).state = SourceState.EXACT

    def lose(self, pool: str) -> None:
        """The event stream of `pool` broke; half a snapshot is worth nothing."""
        source = self._source(pool)
        if source.state is SourceState.REBUILDING:
            self._sources[pool] = _Source()
        else:
            source.state = SourceState.DEGRADED

    def add(self, pool: str, layout_id: bytes, keys: Iterable[BlockKey]) -> None:
        """`pool` stored blocks. Adding one twice is harmless."""
        self._source(pool).blocks.update((layout_id, key) for key in keys)

    def remove(self, pool: str, layout_id: bytes, keys: Iterable[BlockKey]) -> None:
        """`pool` dropped blocks. Removing an unknown one is harmless."""
        self._source(pool).blocks.difference_update((layout_id, key) for key in keys)

    def state(self, pool: str) -> SourceState:
        """How far `pool` is known."""
        return self._source(pool).state

    def num_blocks(self, pool: str) -> int:
        """Blocks that `pool` is known to hold."""
        return len(self._source(pool).blocks)

    def usable_hit(self, pool: str, layout: Layout, hashes: list[bytes], num_tokens: int) -> int:
        """Longest prefix of a prompt that every cache group of `pool` can serve.

        Args:
            pool: Name of the pool.
            layout: Layout that the prompt's engine uses.
            hashes: Hash chain of the prompt.
            num_tokens: Length of the prompt, tokens.

        Returns:
            Tokens, a multiple of `layout.boundary_tokens`, below `num_tokens`; 0 if the pool is
            not EXACT. Costs one set lookup per block of the prompt.
        """
        return self._longest(pool, SourceState.EXACT, layout, hashes, num_tokens)

    def hint(self, pool: str, layout: Layout, hashes: list[bytes], num_tokens: int) -> int:
        """What `usable_hit` would say of a DEGRADED pool if nothing had changed; else 0."""
        return self._longest(pool, SourceState.DEGRADED, layout, hashes, num_tokens)

    def _longest(
        self, pool: str, state: SourceState, layout: Layout, hashes: list[bytes], num_tokens: int
    ) -> int:
        source = self._source(pool)
        if source.state is not state or not hashes:
            return 0
        held = _Held(source.blocks, layout, hashes)
        limit = layout.last_boundary(num_tokens)
        for group in layout.groups:
            if group.kind is GroupKind.FULL_ATTENTION:
                limit = held.leading_run(group, limit)
        boundary = limit // layout.boundary_tokens * layout.boundary_tokens
        others = [group for group in layout.groups if group.kind is not GroupKind.FULL_ATTENTION]
        while boundary > 0 and not all(held.covers(group, boundary) for group in others):
            boundary -= layout.boundary_tokens
        return boundary

    def _source(self, pool: str) -> _Source:
        return self._sources.setdefault(pool, _Source())


@dataclass(frozen=True, slots=True)
class _Held:
    """The blocks of one pool, seen from one prompt."""

    blocks: set[tuple[bytes, BlockKey]]
    layout: Layout
    hashes: list[bytes]

    def has(self, group: CacheGroup, end_token: int) -> bool:
        key = block_key(self.layout, group, self.hashes, end_token)
        return (self.layout.layout_id, key) in self.blocks

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
