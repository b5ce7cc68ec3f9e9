"""The longest prefix of a prompt that each source can serve, found for all of them in one pass.

Sources are bits of a number: a block's holders are one number, and whoever holds a run of blocks is
the `and` of theirs. Along a prompt the holders rarely change, so a pass has few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from prfaas.core.kv.block_table import Values
from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout

Holders = Callable[[CacheGroup, Sequence[bytes]], Values]
"""Numbers of the sets of sources that hold blocks of a group, by the blocks' hashes."""
CHUNK = 64
"""Blocks of the first lookup: most prompts end, or are unknown, within them."""
CHUNK_GROWTH = 16
FEW = 16
"""Up to this, finding sources one by one is faster than all at once."""


def hit_lengths(
    layout: Layout,
    hashes: Sequence[bytes],
    num_tokens: int,
    holders: Holders,
    masks: Sequence[int],
    num_sources: int,
) -> dict[int, int]:
    """Usable prefixes.

    Args:
        layout: Layout of the blocks.
        hashes: Hash chain of the prompt.
        num_tokens: Length of the prompt, tokens.
        holders: Looks blocks up.
        masks: Sources of each set, as bits.

    Returns:
        By tokens, above 0: the sources with this prefix, as bits.
    """
    limit = min(layout.last_boundary(num_tokens), len(hashes) * layout.tokens_per_hash)
    full = [group for group in layout.groups if group.kind is GroupKind.FULL_ATTENTION]
    others = [group for group in layout.groups if group.kind is not GroupKind.FULL_ATTENTION]
    runs = [(limit, (1 << num_sources) - 1)] if limit and num_sources else []
    for group in full:
        runs = _cut(runs, group, layout, hashes, holders, masks) if runs else []
    boundary = layout.boundary_tokens
    by_length: dict[int, int] = {}
    for length, sources in runs:
        whole = length // boundary * boundary
        if whole:
            by_length[whole] = by_length.get(whole, 0) | sources
    if others:
        by_length = _resumable(by_length, others, layout, hashes, holders, masks)
    return by_length


Runs = list[tuple[int, int]]
"""Lengths in tokens, each with the sources whose leading run it is; every source is in one."""


def _cut(
    runs: Runs,
    group: CacheGroup,
    layout: Layout,
    hashes: Sequence[bytes],
    holders: Holders,
    masks: Sequence[int],
) -> Runs:
    """Cut everybody's run to what it holds of one more group."""
    found: Runs = []
    span, limit = group.tokens_per_block, max(length for length, _ in runs)
    alive = _union(bits for _, bits in runs)
    for first, values in _changes(group, layout, hashes, limit // span, holders):
        dropped = alive & ~masks[values]
        if dropped:
            found += [(min(n, first * span), bits & dropped) for n, bits in runs if bits & dropped]
            alive &= ~dropped
        if not alive:
            break
    covered = limit // span * span
    found += [(min(length, covered), bits & alive) for length, bits in runs if bits & alive]
    return [(length, bits) for length, bits in found if length]


def _changes(
    group: CacheGroup,
    layout: Layout,
    hashes: Sequence[bytes],
    num_blocks: int,
    holders: Holders,
) -> Iterator[tuple[int, int]]:
    """Each block of a group, from the first, at which the set of holders is another."""
    step = group.tokens_per_block // layout.tokens_per_hash
    start, size, last = 0, CHUNK, -1
    while start < num_blocks:
        end = min(start + size, num_blocks)
        values = holders(group, hashes[(start + 1) * step - 1 : end * step : step])
        starts = np.flatnonzero(values[1:] != values[:-1]) + 1
        for at in (0, *starts.tolist()):
            value = int(values[at])
            if value != last:
                yield start + at, value
                last = value
        start, size = end, size * CHUNK_GROWTH


def _resumable(
    by_length: dict[int, int],
    groups: Sequence[CacheGroup],
    layout: Layout,
    hashes: Sequence[bytes],
    holders: Holders,
    masks: Sequence[int],
) -> dict[int, int]:
    """Shorten everybody's prefix to where all window and state groups can resume."""
    if not by_length:
        return {}
    boundary, longest = layout.boundary_tokens, max(by_length)
    readers = [_Reader(group, layout, hashes, longest, holders, masks) for group in groups]
    found: dict[int, int] = {}
    waiting = 0
    for length in range(longest, 0, -boundary):
        waiting |= by_length.get(length, 0)
        able = waiting
        for reader in readers:
            able &= reader.able(length, able) if able else 0
        if able:
            found[length] = able
            waiting &= ~able
        if not waiting and length <= min(by_length):
            break
    return found


class _Reader:
    """Sources that can resume at each length, by the blocks of one group."""

    def __init__(
        self,
        group: CacheGroup,
        layout: Layout,
        hashes: Sequence[bytes],
        longest: int,
        holders: Holders,
        masks: Sequence[int],
    ) -> None:
        self._group, self._masks = group, masks
        step = group.tokens_per_block // layout.tokens_per_hash
        values = holders(group, hashes[step - 1 : longest // layout.tokens_per_hash : step])
        self._values: list[int] = values.tolist()
        changes = np.concatenate(([True], values[1:] != values[:-1]))
        self._run_start = np.maximum.accumulate(np.where(changes, np.arange(len(values)), 0))

    def able(self, length: int, asked: int) -> int:
        """Sources of a set that can resume at `length`."""
        group, last = self._group, length // self._group.tokens_per_block - 1
        if group.kind is GroupKind.LINEAR_STATE:
            return asked & self._masks[self._values[last]]
        first = max(0, length - max(group.window_tokens - 1, 1)) // group.tokens_per_block
        while asked and last >= first:
            asked &= self._masks[self._values[last]]
            last = int(self._run_start[last]) - 1
        return asked


def _union(masks: Iterator[int]) -> int:
    bits = 0
    for mask in masks:
        bits |= mask
    return bits


def numbers_of(bits: int) -> list[int]:
    """The bits that are set, in order."""
    if bits.bit_count() > FEW:
        as_bytes = np.frombuffer(bits.to_bytes(bits.bit_length() // 8 + 1, "little"), np.uint8)
        found: list[int] = np.flatnonzero(np.unpackbits(as_bytes, bitorder="little")).tolist()
        return found
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
