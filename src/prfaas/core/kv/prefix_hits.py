"""Cached prefixes of a prompt by source, where thousands of sources may hold the same one.

A prompt has few different prefixes in the sources of a site. Sources with the same one are kept
together, as the bits of a number, so that neither a look-up nor the search for the longest prefixes
takes longer the more sources hold one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

NAMES_PER_PART = 32
"""Sources of one part of `Sources`: a search passes over parts that have none of the wanted."""

Hits = Mapping[str, int]
"""Usable prefix by source, tokens; sources that are left out hold nothing."""
Numbers = Mapping[str, int]
"""Numbers of sources; another object once a source has come, gone or changed its number."""


class PrefixHits(Hits):
    """Usable prefix by source; any number of sources may hold the same one.

    Args:
        by_length: Lengths, tokens, above 0, the longest first, each with its sources as bits. A
            source has one length.
        numbers: Of the sources.
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

    def longest_first(self, sources: Sources) -> Iterator[tuple[int, str]]:
        """Prefixes of some sources and their names, as `longest_first` orders them."""
        parts = sources.parts(self.numbers)
        for num_tokens, bits in self._by_length:
            for part, numbered in parts:
                if bits & part:
                    for name, number in numbered:
                        if bits >> number & 1:
                            yield num_tokens, name

    def without(self, sources: Sources) -> PrefixHits:
        """What other sources hold."""
        theirs = 0
        for part, _ in sources.parts(self.numbers):
            theirs |= part
        left = [(num_tokens, bits & ~theirs) for num_tokens, bits in self._by_length]
        return PrefixHits([each for each in left if each[1]], self.numbers)


_Part = tuple[int, list[tuple[str, int]]]
"""Sources as bits, and their names and numbers."""


class Sources:
    """A set of sources, such as the pools of a cluster.

    Args:
        names: Unique.

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


def longest_first(hits: Hits, sources: Sources) -> Iterator[tuple[int, str]]:
    """Prefixes of some sources, tokens, and their names: the longest first, then the last name.

    Args:
        hits: Prefix by source, tokens.
        sources: The sources that are wanted.
    """
    if isinstance(hits, PrefixHits):
        return hits.longest_first(sources)
    known = hits.keys() & sources.names
    return iter(sorted(((hits[name], name) for name in known), reverse=True))


def without(hits: Hits, sources: Sources) -> Hits:
    """Prefixes of all but some sources."""
    if isinstance(hits, PrefixHits):
        return hits.without(sources)
    return {name: num_tokens for name, num_tokens in hits.items() if name not in sources.names}
