"""Sets of sources that hold the same blocks, numbered.

Millions of blocks lie at a few hundred combinations of sources and tiers. Each combination is kept
once, as three bit masks, and a block only names its number. To forget all of a source is to clear
its bit in every combination; no block has to be touched.

A prompt has few different prefixes in the sources of a site. Sources with the same one are kept
together, too, so that neither a look-up nor the search for the longest prefixes takes longer the
more sources hold one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prfaas.core.invariants import hold
from prfaas.core.kv.block_table import Values

Planes = tuple[int, int, int]
"""Sources that hold a block in each tier, as bits: host, disk, device."""
NOWHERE: Planes = (0, 0, 0)
ALL_TIERS = 7


class SourceSets:
    """Numbered combinations; number 0 is nowhere.

    Attributes:
        num_live: Blocks that somebody holds.
    """

    def __init__(self) -> None:
        self._planes: list[Planes] = [NOWHERE]
        self._anywhere: list[int] = [0]
        self._num_blocks: list[int] = [0]
        self._numbers: dict[Planes, int] = {NOWHERE: 0}
        self._free: list[int] = []
        self.num_live = 0

    def __len__(self) -> int:
        return len(self._planes) - len(self._free)

    def masks(self, tiers: int) -> list[int]:
        """Sources by number that hold a block in one of the tiers (flags)."""
        if tiers == ALL_TIERS:
            return self._anywhere
        return [
            (planes[0] if tiers & 1 else 0)
            | (planes[1] if tiers & 2 else 0)
            | (planes[2] if tiers & 4 else 0)
            for planes in self._planes
        ]

    def changed(self, number: int, source: int, tiers: int, *, added: bool) -> int:
        """Number of the combination with a source's tiers added or removed."""
        old, bit = self._planes[number], 1 << source
        host, disk, device = (bit if tiers & flag else 0 for flag in (1, 2, 4))
        if added:
            planes = old[0] | host, old[1] | disk, old[2] | device
        else:
            planes = old[0] & ~host, old[1] & ~disk, old[2] & ~device
        return self._number(planes)

    def holds(self, number: int, source: int) -> bool:
        """Return True if a source is in a combination."""
        return bool(self._anywhere[number] >> source & 1)

    def move(self, old: int, new: int, num_blocks: int) -> None:
        """Move blocks from one combination to another."""
        if old == new:
            return
        self._count(new, num_blocks)
        self._count(old, -num_blocks)

    def forget(self, source: int) -> None:
        """Take a source out of every combination."""
        keep = ~(1 << source)
        for number, planes in enumerate(self._planes):
            if self._anywhere[number] >> source & 1:
                self._planes[number] = left = planes[0] & keep, planes[1] & keep, planes[2] & keep
                self._anywhere[number] &= keep
                if left == NOWHERE:
                    self.num_live -= self._num_blocks[number]
        # Several numbers can mean the same; new blocks get the last of them.
        counted = zip(self._planes, self._num_blocks, strict=True)
        self._numbers = {planes: number for number, (planes, n) in enumerate(counted) if n}
        self._numbers[NOWHERE] = 0

    def canonical(self, numbers: Values) -> Values:
        """The number that stands for each combination; blocks are renumbered as they are moved."""
        found, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        kept = [self._numbers.setdefault(self._planes[n], n) for n in found.tolist()]
        for old, new, count in zip(found.tolist(), kept, counts.tolist(), strict=True):
            self.move(old, new, count)
        return np.array(kept, np.uint32)[place]

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        counted = zip(self._anywhere, self._num_blocks, strict=True)
        hold(
            live_blocks_are_those_that_a_source_has=self.num_live
            == sum(num for anywhere, num in counted if anywhere),
            no_count_is_negative=min(self._num_blocks) >= 0,
            a_number_stands_for_its_combination=all(
                self._planes[number] == planes for planes, number in self._numbers.items()
            ),
            free_numbers_have_no_blocks=not any(self._num_blocks[number] for number in self._free),
        )

    def _count(self, number: int, change: int) -> None:
        if number == 0:
            return
        self._num_blocks[number] += change
        if self._anywhere[number]:
            self.num_live += change
        if self._num_blocks[number] == 0 and change < 0:
            self._release(number)

    def _release(self, number: int) -> None:
        planes = self._planes[number]
        if self._numbers.get(planes) == number:
            del self._numbers[planes]
        self._planes[number], self._anywhere[number] = NOWHERE, 0
        self._free.append(number)

    def _number(self, planes: Planes) -> int:
        number = self._numbers.get(planes)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = len(self._planes)
                self._planes.append(NOWHERE)
                self._anywhere.append(0)
                self._num_blocks.append(0)
            self._planes[number] = planes
            self._anywhere[number] = planes[0] | planes[1] | planes[2]
            self._numbers[planes] = number
        return number


NAMES_PER_PART = 32
"""Sources of one part of `SourceSet`: a search passes over parts that have none of the wanted."""

Hits = Mapping[str, int]
"""Usable prefix by source, tokens; sources that are left out hold nothing."""
Numbers = Mapping[str, int]
"""Numbers of sources; another object once a source has come, gone or changed its number."""


class PrefixHits(Hits):
    """Usable prefix by source; any number of sources may hold the same one.

    Args:
        by_length: Lengths, tokens, above 0, the longest first, each with its sources as bits. A
            source has one length.
    """

    __slots__ = ("_by_length", "numbers")

    def __init__(self, by_length: Sequence[tuple[int, int]], numbers: Numbers) -> None:
        self._by_length, self.numbers = by_length, numbers

    def get(self, source: str, default: Any = None) -> Any:
        """The prefix of a source, tokens; `default` if it holds nothing."""
        number = self.numbers.get(source)
        if number is not None:
            for num_tokens, bits in self._by_length:
                if bits >> number & 1:
                    return num_tokens
        return default

    def __getitem__(self, source: str) -> int:
        found: int | None = self.get(source)
        if found is None:
            raise KeyError(source)
        return found

    def __iter__(self) -> Iterator[str]:
        held = 0
        for _, bits in self._by_length:
            held |= bits
        return (source for source, number in self.numbers.items() if held >> number & 1)

    def __len__(self) -> int:
        return sum(bits.bit_count() for _, bits in self._by_length)

    def longest_first(self, sources: SourceSet) -> Iterator[tuple[int, str]]:
        """Prefixes of some sources and their names, as `longest_first` orders them."""
        parts = sources.parts(self.numbers)
        for num_tokens, bits in self._by_length:
            for part, numbered in parts:
                if bits & part:
                    for name, number in numbered:
                        if bits >> number & 1:
                            yield num_tokens, name

    def by_length(self, sources: SourceSet) -> Iterator[tuple[int, list[str]]]:
        """Prefixes of some sources, as `by_length` orders them."""
        parts = sources.parts(self.numbers)
        for num_tokens, bits in self._by_length:
            held = (numbered for part, numbered in parts if bits & part)
            names = [name for numbered in held for name, number in numbered if bits >> number & 1]
            if names:
                yield num_tokens, names

    def without(self, sources: SourceSet) -> PrefixHits:
        """Blocks of other sources."""
        theirs = 0
        for part, _ in sources.parts(self.numbers):
            theirs |= part
        left = [(num_tokens, bits & ~theirs) for num_tokens, bits in self._by_length]
        return PrefixHits([each for each in left if each[1]], self.numbers)


_Part = tuple[int, list[tuple[str, int]]]
"""Sources as bits, and their names and numbers."""


class SourceSet:
    """A set of sources, such as the pools of a cluster.

    Attributes:
        names: Of the sources; to be changed by `add` and `discard` alone.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = set(names)
        self._parts: list[_Part] = []
        self._numbers: Numbers | None = None

    def add(self, name: str) -> None:
        """Add a source; no effect if it is there."""
        self.names.add(name)
        self._numbers = None

    def discard(self, name: str) -> None:
        """Remove a source; no effect if it is not there."""
        self.names.discard(name)
        self._numbers = None

    def parts(self, numbers: Numbers) -> list[_Part]:
        """The sources that have a number, the last name first, in parts of `NAMES_PER_PART`."""
        if numbers is not self._numbers:
            ordered = sorted(self.names & numbers.keys(), reverse=True)
            known = [(name, numbers[name]) for name in ordered]
            parts = [
                known[start : start + NAMES_PER_PART]
                for start in range(0, len(known), NAMES_PER_PART)
            ]
            self._parts = [(sum(1 << number for _, number in part), part) for part in parts]
            self._numbers = numbers
        return self._parts


def longest_first(hits: Hits, sources: SourceSet) -> Iterator[tuple[int, str]]:
    """Prefixes of some sources, tokens, and their names: the longest first, then the last name.

    Args:
        hits: Prefix by source, tokens.
    """
    if isinstance(hits, PrefixHits):
        return hits.longest_first(sources)
    known = hits.keys() & sources.names
    return iter(sorted(((hits[name], name) for name in known), reverse=True))


def by_length(hits: Hits, sources: SourceSet) -> Iterator[tuple[int, list[str]]]:
    """Prefixes of some sources, tokens, the longest first, each with the names that have it."""
    if isinstance(hits, PrefixHits):
        return hits.by_length(sources)
    found: dict[int, list[str]] = {}
    for num_tokens, name in longest_first(hits, sources):
        found.setdefault(num_tokens, []).append(name)
    return iter(found.items())


def without(hits: Hits, sources: SourceSet) -> Hits:
    """Prefixes of all but some sources."""
    if isinstance(hits, PrefixHits):
        return hits.without(sources)
    return {name: num_tokens for name, num_tokens in hits.items() if name not in sources.names}
