"""The prefix index: sources of blocks, and the hits of a prompt in every source.

The index is fed by ordered event streams, one per source: a pool node, or an engine for its device
memory. When a stream breaks or has a gap, what was known of the source is no longer certain: it
counts as no hit, and only draws requests to the source, until a new snapshot begins. During a
snapshot the source counts as empty.

A block costs 15 to 40 bytes however many sources hold it: one place of a hash table
(`block_table.py`) with its short key (`short_keys.py`) and the number of the set of its sources
(`source_sets.py`). One look at a prompt's hashes answers for all sources (`hit_lengths.py`).

Changes of the prefix index that wait to be written together.

A change is a block, by its short key, and a code: source, tier, and whether the block came or left,
as one number. Numpy writes some thousands at once far faster than each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag, StrEnum

import numpy as np

from prfaas.core.invariants import hold
from prfaas.core.kv.block_table import (
    BlockTable,
    Flags,
    Keys,
    Places,
    Values,
    group_keys,
    short_key,
    short_keys,
    short_keys_of,
    tails,
)
from prfaas.core.kv.blocks import CacheGroup, Layout
from prfaas.core.kv.hit_lengths import hit_lengths, numbers_of
from prfaas.core.kv.source_sets import Hits, Numbers, PrefixHits, SourceSets

PENDING_KEYS_MAX = 4096
"""Changes that wait to be written together."""


class PendingChanges:
    """Changes in the order in which they came."""

    def __init__(self) -> None:
        self._parts: list[tuple[Keys, Places]] = []
        self._num_keys = 0
        self._few: tuple[list[int], list[int]] = [], []
        """Keys and codes of the last few, behind all others."""

    def add(self, keys: Keys, codes: Places) -> bool:
        """Add changes; return True if so many wait that they should be taken now."""
        self._settle()
        self._parts.append((keys, codes))
        self._num_keys += len(keys)
        return self._num_keys >= PENDING_KEYS_MAX

    def add_few(self, keys: list[int], code: int) -> bool:
        """Add the same change of a few blocks; returns as `add`."""
        keys_of_few, codes = self._few
        keys_of_few += keys
        codes += [code] * len(keys)
        return self._num_keys + len(codes) >= PENDING_KEYS_MAX

    def take(self) -> Iterator[tuple[Keys, Places]]:
        """Take all that waits, some thousands at a time and no block twice in one part."""
        self._settle()
        if not self._parts:
            return
        waiting, self._parts, self._num_keys = self._parts, [], 0
        keys = np.concatenate([part for part, _ in waiting])
        codes = np.concatenate([part for _, part in waiting])
        for start in range(0, len(keys), PENDING_KEYS_MAX):
            end = start + PENDING_KEYS_MAX
            yield from _rounds(keys[start:end], codes[start:end])

    def _settle(self) -> None:
        """Put the last few behind the others."""
        (keys, codes), self._few = self._few, ([], [])
        if keys:
            self._parts.append((np.array(keys, np.uint64), np.array(codes, np.int64)))
            self._num_keys += len(keys)


def _rounds(keys: Keys, codes: Places) -> Iterator[tuple[Keys, Places]]:
    """Changes in rounds: a block that several changes are about gets one of them a round."""
    while len(keys):
        _, first = np.unique(keys, return_index=True)
        first.sort()
        yield keys[first], codes[first]
        if len(first) == len(keys):
            break
        rest = np.ones(len(keys), np.bool_)
        rest[first] = False
        keys, codes = keys[rest], codes[rest]


class SourceState(StrEnum):
    """State of a source in the index."""

    EXACT = "exact"
    INCOMPLETE = "incomplete"
    """The source may hold more than the index: a hit is a lower bound."""
    DEGRADED = "degraded"
    """The stream broke: what the source held then is a hint."""
    REBUILDING = "rebuilding"
    """Waiting for a snapshot, or in the middle of one."""

    @property
    def is_live(self) -> bool:
        """Return True if every event was received, so that a hit is certain."""
        return self in (SourceState.EXACT, SourceState.INCOMPLETE)


class Tier(IntFlag):
    """Tier of a block; it can be in several."""

    HOST = 1
    DISK = 2
    DEVICE = 4
    ANY = 7


NUM_BLOCKS_MAX = 16_000_000
"""Blocks of one source that are remembered."""
NAMED_MAX = 256
"""Sets of sources whose names are kept at hand."""
FEW_HOLDERS = 64
"""Up to so many sources with a prefix, each is named in the answer."""
FEW_KEYS = 8
"""Up to this, naming blocks one by one is faster than all at once."""


@dataclass(slots=True)
class _Source:
    name: str
    number: int
    state: SourceState = SourceState.REBUILDING
    full: bool = False
    num_blocks: int = 0


class PrefixIndex:
    """Blocks by source and tier.

    Changes are written some thousands at a time, and before anybody looks.

    Args:
        num_blocks_max: Blocks of one source that are remembered. Of a source with more some are not
            known, and it counts as INCOMPLETE until its next snapshot.
    """

    def __init__(self, num_blocks_max: int = NUM_BLOCKS_MAX) -> None:
        self._num_blocks_max = num_blocks_max
        self._sources: dict[str, _Source] = {}
        self._by_number: list[_Source] = []
        self._numbers: Numbers = {}
        """Of all sources; a new one for each change, since answers keep it."""
        self._free: list[int] = []
        """Numbers of forgotten sources."""
        self._live = self._degraded = 0
        """Numbers of sources in these states, as bits."""
        self._named: dict[int, list[str]] = {}
        """Names of sources by their numbers as bits, those that were asked for."""
        self._sets = SourceSets()
        self._table = BlockTable(self._sets.canonical)
        self._pending = PendingChanges()

    # What sources say

    def begin_snapshot(self, source: str) -> None:
        """Forget what is known of `source`; it counts as empty until `end_snapshot`."""
        self._write()
        known = self._source(source)
        self._sets.forget(known.number)
        known.full, known.num_blocks = False, 0
        self._set_state(known, SourceState.REBUILDING)

    def end_snapshot(self, source: str, *, complete: bool = True) -> None:
        """All blocks of the snapshot were added: trust the source from here on.

        Args:
            complete: The snapshot names all that the source holds.
        """
        self._write()
        known = self._source(source)
        known.full = known.full or not complete
        self._set_state(known, SourceState.INCOMPLETE if known.full else SourceState.EXACT)

    def lose(self, source: str) -> None:
        """The event stream of `source` broke; half a snapshot is worth nothing."""
        known = self._sources.get(source)
        if known is None:
            return
        if known.state is SourceState.REBUILDING:
            self.begin_snapshot(source)
        else:
            self._set_state(known, SourceState.DEGRADED)

    def forget(self, source: str) -> None:
        """Forget a source and what it holds; its number is free for another one."""
        if source in self._sources:
            self.begin_snapshot(source)
            self._free.append(self._sources.pop(source).number)
            self._numbers = {name: known.number for name, known in self._sources.items()}

    def resume(self, source: str) -> None:
        """A DEGRADED source is followed again, and nothing was missed."""
        known = self._source(source)
        if known.state is SourceState.DEGRADED:
            self._set_state(known, SourceState.INCOMPLETE if known.full else SourceState.EXACT)

    def add(
        self,
        source: str,
        layout_id: bytes,
        keys: Sequence[tuple[int, bytes]],
        tier: Tier = Tier.HOST,
    ) -> None:
        """`source` stored blocks, by group and hash, in a tier. Adding one twice is harmless."""
        self._change(source, layout_id, keys, tier, added=True)

    def remove(
        self,
        source: str,
        layout_id: bytes,
        keys: Sequence[tuple[int, bytes]],
        tier: Tier = Tier.ANY,
    ) -> None:
        """`source` dropped blocks from a tier. Removing an unknown one is harmless."""
        self._change(source, layout_id, keys, tier, added=False)

    def change(
        self,
        source: str,
        layout_id: bytes,
        ends: Keys,
        runs: Sequence[tuple[int, bool, int]],
        tier: Tier,
    ) -> None:
        """`add` and `remove` in order, of blocks named by the last 64 bits of their hashes.

        Args:
            layout_id: Layout of the blocks.
            ends: Of all blocks.
            runs: How many of them in a row came (True) or left, and their cache group.
        """
        counts, added, groups = zip(*runs, strict=True)
        keys = short_keys(layout_id, groups, counts, ends)
        base = self._source(source).number << 4 | int(tier) << 1
        codes = np.repeat(np.array([base | flag for flag in added]), counts)
        if self._pending.add(keys, codes):
            self._write()

    # What is known

    def state(self, source: str) -> SourceState:
        """State of `source`."""
        self._write()
        return self._source(source).state

    def is_live(self, source: str) -> bool:
        """Return True if what a source is known to hold is certain; what waits to be written cannot
        change that."""
        return self._source(source).state.is_live

    def num_blocks(self, source: str) -> int:
        """Blocks that `source` is known to hold."""
        self._write()
        return self._source(source).num_blocks

    @property
    def num_blocks_known(self) -> int:
        """Different blocks that anybody holds."""
        self._write()
        return self._sets.num_live

    @property
    def num_bytes(self) -> int:
        """Memory of the table, bytes."""
        return self._table.num_bytes

    def hits(
        self,
        layout: Layout,
        hashes: Sequence[bytes],
        num_tokens: int,
        tiers: Tier = Tier.ANY,
    ) -> tuple[Hits, Hits]:
        """Longest prefix of a prompt that every cache group of each source can serve.

        Args:
            layout: Layout that the prompt's engine uses.
            hashes: Hash chain of the prompt.
            num_tokens: Length of the prompt, tokens.
            tiers: Blocks count that lie in one of these.

        Returns:
            By source, tokens, multiples of `layout.boundary_tokens` below `num_tokens`: those of
            live sources, and what DEGRADED ones would say if nothing had changed. Who has nothing
            is left out.
        """
        by_length = self._lengths(layout, hashes, num_tokens, tiers)
        return self._answer(by_length, self._live), self._answer(by_length, self._degraded)

    def usable_hit(
        self,
        source: str,
        layout: Layout,
        hashes: Sequence[bytes],
        num_tokens: int,
        tiers: Tier = Tier.ANY,
    ) -> int:
        """Hit of one source; 0 unless it is live."""
        return self.hits(layout, hashes, num_tokens, tiers)[0].get(source, 0)

    def hint(self, source: str, layout: Layout, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Hit of a DEGRADED source if nothing has changed; otherwise 0."""
        return self.hits(layout, hashes, num_tokens)[1].get(source, 0)

    def num_held(
        self, source: str, layout: Layout, group: CacheGroup, hashes: Sequence[bytes], tier: Tier
    ) -> int:
        """Blocks of a prompt in one cache group that `source` holds in a tier, holes or not."""
        self._write()
        step = group.tokens_per_block // layout.tokens_per_hash
        names = hashes[step - 1 :: step]
        if not names:
            return 0
        masks = self._sets.masks(int(tier))
        numbers = self._table.get(group_keys(layout.layout_id, group.index, tails(names)))
        number = self._source(source).number
        return sum(masks[value] >> number & 1 for value in numbers.tolist())

    # Steps

    def _lengths(
        self, layout: Layout, hashes: Sequence[bytes], num_tokens: int, tiers: Tier
    ) -> dict[int, int]:
        self._write()
        masks = self._sets.masks(int(tiers))

        def holders(group: CacheGroup, names: Sequence[bytes]) -> Values:
            return self._table.get(group_keys(layout.layout_id, group.index, tails(names)))

        return hit_lengths(layout, hashes, num_tokens, holders, masks, len(self._by_number))

    def _answer(self, by_length: dict[int, int], wanted: int) -> Hits:
        """Prefixes of the sources in a set."""
        held = [(length, found) for length, bits in by_length.items() if (found := bits & wanted)]
        if sum(bits.bit_count() for _, bits in held) > FEW_HOLDERS:
            held.sort(reverse=True)
            return PrefixHits(held, self._numbers)
        answer: dict[str, int] = {}
        for length, bits in held:
            answer.update(dict.fromkeys(self._names(bits), length))
        return answer

    def _names(self, bits: int) -> list[str]:
        """Names of sources. Most prompts begin with blocks that the same ones hold."""
        found = self._named.get(bits)
        if found is None:
            if len(self._named) == NAMED_MAX:
                self._named.clear()
            found = self._named[bits] = [self._by_number[n].name for n in numbers_of(bits)]
        return found

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        numbers = {source.number for source in self._sources.values()}
        hold(
            a_number_is_of_one_source=len(numbers) == len(self._sources)
            and not numbers & set(self._free)
            and len(numbers) + len(self._free) == len(self._by_number),
            the_bits_are_those_of_the_states=all(
                (self._live >> source.number & 1) == source.state.is_live
                and (self._degraded >> source.number & 1) == (source.state is SourceState.DEGRADED)
                for source in self._sources.values()
            ),
        )
        self._sets.validate()
        self._table.validate()

    def _set_state(self, source: _Source, state: SourceState) -> None:
        source.state, bit = state, 1 << source.number
        self._live = self._live | bit if state.is_live else self._live & ~bit
        is_degraded = state is SourceState.DEGRADED
        self._degraded = self._degraded | bit if is_degraded else self._degraded & ~bit

    def _source(self, name: str) -> _Source:
        known = self._sources.get(name)
        if known is None:
            number = self._free.pop() if self._free else len(self._by_number)
            known = self._sources[name] = _Source(name, number)
            self._by_number[number : number + 1] = [known]
            self._named.clear()
            self._numbers = {**self._numbers, name: number}
        return known

    def _change(
        self,
        source: str,
        layout_id: bytes,
        named: Sequence[tuple[int, bytes]],
        tier: Tier,
        *,
        added: bool,
    ) -> None:
        code = self._source(source).number << 4 | int(tier) << 1 | added
        if len(named) > FEW_KEYS:
            keys = short_keys_of(layout_id, named)
            is_full = self._pending.add(keys, np.full(len(keys), code, np.int64))
        else:
            few = [short_key(layout_id, group, block_hash) for group, block_hash in named]
            is_full = self._pending.add_few(few, code)
        if is_full:
            self._write()

    def _write(self) -> None:
        """Write what waits."""
        for keys, codes in self._pending.take():
            self._write_round(keys, codes)

    def _write_round(self, keys: Keys, codes: Places) -> None:
        """Write changes to different blocks."""
        before = self._table.get(keys)
        pairs = before.astype(np.int64) | codes << 32
        found, place, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        after = np.empty(len(found), np.uint32)
        left_out: list[Flags] = []
        for at, (pair, count) in enumerate(zip(found.tolist(), counts.tolist(), strict=True)):
            old, code = pair & 0xFFFFFFFF, pair >> 32
            source = self._by_number[code >> 4]
            held = self._sets.holds(old, code >> 4)
            taken = count
            if code & 1 and not held:
                taken = min(count, self._num_blocks_max - source.num_blocks)
                if taken < count:
                    self._overflow(source)
                    left_out.append(_beyond(place == at, taken))
            new = old
            if taken:
                new = self._sets.changed(old, code >> 4, code >> 1 & 7, added=bool(code & 1))
                self._sets.move(old, new, taken)
                source.num_blocks += taken * (self._sets.holds(new, code >> 4) - held)
            after[at] = new
        values = after[place]
        keep = values != before
        for beyond in left_out:
            keep &= ~beyond
        if keep.any():
            self._table.put(keys[keep], values[keep], self._sets.num_live)

    def _overflow(self, source: _Source) -> None:
        source.full = True
        if source.state is SourceState.EXACT:
            self._set_state(source, SourceState.INCOMPLETE)


def _beyond(chosen: Flags, taken: int) -> Flags:
    """All of the chosen but the first `taken`."""
    return chosen & (np.cumsum(chosen) > taken)
