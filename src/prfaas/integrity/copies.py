"""Copies of prefixes that no request asked for, until a request uses them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

COPIES_MAX = 4096
"""Copies that are remembered; of older ones the first use is not verified."""


class Copies:
    """Sources of copied prefixes, by the pool that has them and the name of their end."""

    def __init__(self) -> None:
        self._sources: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def note(self, source: str, pool: str, hashes: Sequence[bytes]) -> None:
        """A pool fetches a prefix of a prompt with these hashes."""
        if hashes:
            self._sources[pool, hashes[-1]] = source
        while len(self._sources) > COPIES_MAX:
            self._sources.popitem(last=False)

    def take(self, pool: str, hashes: Sequence[bytes]) -> frozenset[str]:
        """Return the sources of the copies that a prompt with these hashes uses, once."""
        if not self._sources:
            return frozenset()
        found = (self._sources.pop((pool, each), "") for each in hashes)
        return frozenset(source for source in found if source)
