"""A hash table from 64-bit keys to 32-bit values that is read and written many keys at a time.

Keys and values lie in the order in which they came, 10 bytes each, 12 once a value has more than 16
bits, behind an index of 4 bytes a slot, with open addressing and double hashing. Blocks that follow
each other in a prompt came one behind the other: most are found beside their neighbours, where
memory is fast, and not by the index. A table that fills up is moved to a new one a few thousand
places at a time, so that no request waits for millions of blocks to be moved; until it is done both
are read. Value 0 is no value: its place stays taken until the next move.

Names of blocks in 64 bits: what the prefix index remembers of them.

A short key is the end of the block hash, mixed with layout and group. Engines that announce hashes
as numbers announce just these bits. Among ten million blocks two share a short key with a chance of
three in a million; then a hit is predicted that is not there, and costs a miss: blocks themselves
are always named in full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from prfaas.core.invariants import hold
from prfaas.core.kv.blocks import HASH_BYTES
from prfaas.core.kv.hashes import joined

_TAIL = HASH_BYTES // 8
_ODD = 0x9E3779B97F4A7C15
_ONE = np.uint64(1)
_TAIL_MASK = (1 << 64) - 1


@lru_cache(maxsize=256)
def _salt_number(layout_id: bytes, group: int) -> int:
    seed = int.from_bytes(hashlib.sha256(layout_id).digest()[:8], "big")
    return (seed + group * _ODD) & _TAIL_MASK


@lru_cache(maxsize=256)
def _salt(layout_id: bytes, group: int) -> np.uint64:
    return np.uint64(_salt_number(layout_id, group))


def tails(hashes: Sequence[bytes]) -> Keys:
    """The last 64 bits of each 32-byte hash."""
    words = np.frombuffer(joined(hashes), ">u8")
    if len(words) != _TAIL * len(hashes):
        raise ValueError(f"a block hash has {HASH_BYTES} bytes")
    return words[_TAIL - 1 :: _TAIL].astype(np.uint64)


def tails_of(hashes: Sequence[int | bytes]) -> Keys:
    """The same of hashes as engines announce them: bytes, or numbers of which the end is looked at;
    ValueError if one has fewer than 8 bytes."""
    if set(map(type, hashes)) == {int}:
        with suppress(OverflowError):
            return np.array(hashes, np.uint64)
    return np.array([_tail(block_hash) for block_hash in hashes], np.uint64)


def _tail(block_hash: int | bytes) -> int:
    if isinstance(block_hash, int):
        return block_hash & _TAIL_MASK
    if len(block_hash) < 8:
        raise ValueError(f"a block hash of {len(block_hash)} bytes; 8 are needed")
    return int.from_bytes(block_hash[-8:], "big")


def group_keys(layout_id: bytes, group: int, ends: Keys) -> Keys:
    """Short keys of blocks of one group; never 0."""
    keys: Keys = np.maximum(ends ^ _salt(layout_id, group), _ONE)
    return keys


def short_keys(layout_id: bytes, groups: Sequence[int], counts: Sequence[int], ends: Keys) -> Keys:
    """Short keys of blocks of which so many in a row are of each group; never 0."""
    salts = np.array([_salt(layout_id, group) for group in groups], np.uint64)
    keys: Keys = np.maximum(ends ^ np.repeat(salts, counts), _ONE)
    return keys


def short_key(layout_id: bytes, group: int, block_hash: bytes) -> int:
    """Short key of one block, by group and hash."""
    if len(block_hash) != HASH_BYTES:
        raise ValueError(f"a block hash has {HASH_BYTES} bytes")
    return max(int.from_bytes(block_hash[-8:], "big") ^ _salt_number(layout_id, group), 1)


def short_keys_of(layout_id: bytes, keys: Sequence[tuple[int, bytes]]) -> Keys:
    """Short keys of any blocks of a layout, by group and hash."""
    if not keys:
        return np.zeros(0, np.uint64)
    groups, hashes = zip(*keys, strict=True)
    salts = {group: _salt(layout_id, group) for group in set(groups)}
    mixed = np.fromiter(map(salts.__getitem__, groups), np.uint64, len(groups))
    found: Keys = np.maximum(tails(hashes) ^ mixed, _ONE)
    return found


Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

_NARROW_MAX, _VALUE_MAX = 2**16 - 1, 2**32 - 1
SLOTS_MIN = 1 << 12
FEW = 16
"""Up to this, finding keys one by one is faster than all at once."""
RUN = 64
"""Of so many keys one is looked up, and the others are first sought beside it."""
LOAD_MAX = 0.7
"""Share of slots that are taken before the table moves."""
LOAD_DOUBLING = 0.5
"""Share of slots that hold a value above which the next table is larger."""
LOAD_HALVING = 0.1
LOAD_READY = 0.6
"""Share of slots that are taken before the next table is made ready."""
TOUCHED_PER_KEY = 32
MOVED_PER_KEY = 5
MOVED_MIN = 2500
"""Old places that each write moves."""


class _Slots:
    """Keys and values by place, and places by key; keys are never 0, and place 0 is no place.

    Args:
        num_slots: Of the index.
        value_max: Largest value that is to be kept.
    """

    def __init__(self, num_slots: int, value_max: int) -> None:
        self._index = np.zeros(num_slots, np.int32)
        num_places = int(LOAD_MAX * num_slots) + 1
        self.keys: Keys = np.zeros(num_places, np.uint64)
        narrow = value_max <= _NARROW_MAX
        self.values: npt.NDArray[np.uint16 | np.uint32] = np.zeros(
            num_places, np.uint16 if narrow else np.uint32
        )
        self.num_taken = 0
        self._mask = np.uint64(num_slots - 1)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return self._index.nbytes + self.keys.nbytes + self.values.nbytes

    def touch(self, start: int, end: int) -> None:
        """Have the system allocate some slots; places are taken one after the other anyway."""
        self._index[start:end] = 0

    def clear(self, keys: Keys) -> None:
        """Remove the values of keys."""
        self.values[self.find(keys)] = 0

    def find(self, keys: Keys) -> Places:
        """Place of each key, 0 without one."""
        if len(keys) < 2 * RUN:
            return self._look_up(keys)[0]
        # Places are looked at with "clip": a wrong guess need not be within the array.
        anchors = self._look_up(keys[::RUN])[0]
        found: Places = (anchors[:, None] + np.arange(RUN)).ravel()[: len(keys)]
        left = np.flatnonzero(self.keys.take(found, mode="clip") != keys)
        if left.size:
            behind = np.append(anchors[1:], 0)[left // RUN] + (left % RUN - RUN)
            found[left] = behind
            left = left[self.keys.take(behind, mode="clip") != keys[left]]
            found[left] = self._look_up(keys[left])[0]
        return found

    def _look_up(self, keys: Keys) -> tuple[Places, Keys]:
        """Places by the index, and the slots at which the search for each key ended."""
        ends = keys & self._mask
        found: Places = self._index.take(ends.view(np.int64), mode="clip").astype(np.int64)
        other = np.flatnonzero(self.keys.take(found, mode="clip") != keys)
        open_ = other[found[other] != 0]
        slot, wanted = ends[open_], keys[open_]
        while open_.size > FEW:
            slot = (slot + _stride(wanted)) & self._mask
            place = self._index.take(slot.view(np.int64), mode="clip")
            found[open_], ends[open_] = place, slot
            left = (place != 0) & (self.keys.take(place, mode="clip") != wanted)
            open_, slot, wanted = open_[left], slot[left], wanted[left]
        for at, key, first in zip(open_.tolist(), wanted.tolist(), slot.tolist(), strict=True):
            found[at], ends[at] = self._look_up_one(key, first)
        return found, ends

    def _look_up_one(self, key: int, slot: int) -> tuple[int, int]:
        """Place of a key behind a slot, and the slot at which the search ended."""
        index, keys, mask, stride = self._index, self.keys, len(self) - 1, key >> 40 | 1
        while place := index.item(slot := (slot + stride) & mask):
            if keys.item(place) == key:
                break
        return place, slot

    def claim(self, keys: Keys) -> Places:
        """Place of each key, taken where there was none. Keys are distinct."""
        found, slot = self._look_up(keys)
        new = np.flatnonzero(found == 0)
        place = np.arange(self.num_taken + 1, self.num_taken + 1 + len(new))
        self.num_taken += len(new)
        if self.num_taken >= len(self.keys):
            self.keys = np.append(self.keys, np.zeros(len(new), np.uint64))
            self.values = np.append(self.values, np.zeros(len(new), self.values.dtype))
        found[new] = place
        self.keys[place] = wanted = keys[new]
        slot = slot[new]
        while place.size:
            free = self._index[slot] == 0
            # Of several that want one slot the last gets it; the others look further.
            self._index[slot[free]] = place[free]
            left = self._index[slot] != place
            place, wanted = place[left], wanted[left]
            slot = (slot[left] + _stride(wanted)) & self._mask
        return found


def _stride(keys: Keys) -> Keys:
    """Probe distance of a key; odd, so that it reaches every slot."""
    return keys >> np.uint64(40) | np.uint64(1)


class BlockTable:
    """Values by key.

    Args:
        canonical: Gives the value to keep for values that are moved; 0 drops them.
    """

    def __init__(self, canonical: Callable[[Values], Values]) -> None:
        self._canonical = canonical
        self._value_max = _NARROW_MAX
        self._slots = _Slots(SLOTS_MIN, _NARROW_MAX)
        self._old: _Slots | None = None
        self._num_moved = 0
        self._next: _Slots | None = None
        self._num_touched = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        tables = (slots for slots in (self._slots, self._old, self._next) if slots)
        return sum(slots.num_bytes for slots in tables)

    def get(self, keys: Keys) -> Values:
        """Value of each key, 0 without one."""
        values = _read(self._slots, keys)
        if self._old is not None:
            rest = np.flatnonzero(values == 0)
            values[rest] = _read(self._old, keys[rest])
        return values

    def put(self, keys: Keys, values: Values, num_live: int) -> None:
        """Set the value of every key.

        Args:
            values: 0 removes a value.
            num_live: Keys that have a value in all, about; sizes the next table.
        """
        if self._value_max == _NARROW_MAX and values.max(initial=0) > _NARROW_MAX:
            self._value_max = _VALUE_MAX
            self._start(_Slots(len(self._slots), _VALUE_MAX))
        self._make_room(len(keys), num_live)
        kept = values != 0
        if self._old is not None:
            self._old.clear(keys)
        self._slots.clear(keys[~kept])
        self._slots.values[self._slots.claim(keys[kept])] = values[kept]
        self._move(MOVED_PER_KEY * len(keys) + MOVED_MIN)

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        old = self._old
        held = self._slots.keys[self._slots.values != 0]
        hold(
            taken_places_are_counted=self._slots.num_taken == np.count_nonzero(self._slots.keys),
            every_key_is_found=bool(self._slots.find(held).all()) and not self._slots.values[0],
            a_value_has_a_key=bool(held.all()) and len(np.unique(held)) == len(held),
            moved_places_are_empty=old is None or not old.values[: self._num_moved + 1].any(),
            a_key_has_one_value=old is None or not np.isin(old.keys[old.values != 0], held).any(),
        )

    def _make_room(self, num_keys: int, num_live: int) -> None:
        slots = self._slots
        num_taken = slots.num_taken + num_keys
        if num_taken > LOAD_READY * len(slots):
            self._prepare(num_keys, num_live + num_keys)
        if num_taken <= LOAD_MAX * len(slots) or self._next is None:
            return
        self._start(self._next)

    def _start(self, table: _Slots) -> None:
        """Start to move all to another table."""
        if self._old is not None:
            self._move(self._old.num_taken)
        self._old, self._slots, self._next, self._num_moved = self._slots, table, None, 0

    def _prepare(self, num_keys: int, num_live: int) -> None:
        """Make the next table, and touch its memory bit by bit: all at once takes a while."""
        if self._next is None or num_live > LOAD_MAX * len(self._next):
            size = len(self._slots)
            if num_live < LOAD_HALVING * size:
                size = max(SLOTS_MIN, size // 2)
            while num_live > LOAD_DOUBLING * size:
                size *= 2
            self._next, self._num_touched = _Slots(size, self._value_max), 0
        end = self._num_touched + TOUCHED_PER_KEY * num_keys
        self._next.touch(self._num_touched, end)
        self._num_touched = end

    def _move(self, num_places: int) -> None:
        old = self._old
        if old is None:
            return
        start = self._num_moved + 1
        end = min(start + num_places, old.num_taken + 1)
        values = old.values[start:end]
        held = np.flatnonzero(values)
        kept = self._canonical(values[held].astype(np.uint32))
        keys = old.keys[start:end][held][kept != 0]
        self._slots.values[self._slots.claim(keys)] = kept[kept != 0]
        # Its keys stay: others are found behind them.
        values[:] = 0
        self._num_moved = end - 1
        if end > old.num_taken:
            self._old = None


def _read(slots: _Slots, keys: Keys) -> Values:
    values: Values = slots.values.take(slots.find(keys)).astype(np.uint32)
    return values
