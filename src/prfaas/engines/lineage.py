"""Origins of the blocks in an engine's memory.

An engine loads a block of pool S; what it computes after that block, for the same request or for
any other whose prompt begins alike, is of S as well, although that other request may have found the
block in the engine's own memory and loaded nothing. Block names are chained over the tokens, so a
request's own names tell: if one of them was loaded with source S, all that it stores is of S. And
whoever uses any block of a load has its first one before it: that name is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

from prfaas.core.cache.keep_rules import EVERY
from prfaas.wire.messages.fields import SOURCES_MAX

K = TypeVar("K", bound=Hashable)

LOADED_MAX = 262_144
"""Names that are remembered, about 30 MB. What is beyond counts for every prompt from then on."""


class Lineage(Generic[K]):
    """Names of the blocks that an engine loaded and that came from other pools.

    Args:
        loaded_max: Names remembered. The oldest is dropped for a new one, and its sources are then
            those of all that is stored, until the engine forgets.
    """

    def __init__(self, loaded_max: int = LOADED_MAX) -> None:
        self._loaded_max = loaded_max
        self._loaded: dict[K, frozenset[str]] = {}
        self._always: frozenset[str] = frozenset()

    def loaded(self, names: Iterable[K], sources: Collection[str]) -> None:
        """Blocks were loaded.

        Args:
            names: Of the blocks, or of the one that lies first in the prompt. With none, all that
                is stored from then on is of these sources.
            sources: Pools that they came from; none if they were computed locally.
        """
        if not sources:
            return
        found, is_named = frozenset(sources), False
        for name in names:
            known, is_named = self._loaded.pop(name, found), True
            self._loaded[name] = found if known <= found else found | known
        if not is_named:
            self._always |= found
        while len(self._loaded) > self._loaded_max:
            self._always |= self._loaded.pop(next(iter(self._loaded)))

    def sources(self, names: Collection[K]) -> list[str]:
        """Pools that the blocks of a request are of, SOURCES_MAX at most.

        Args:
            names: Of all blocks of its prompt so far, whatever it has loaded itself.
        """
        found = self._always
        if self._loaded and not self._loaded.keys().isdisjoint(names):
            for name in self._loaded.keys() & names:
                found |= self._loaded[name]
        return sorted(found) if len(found) <= SOURCES_MAX else [EVERY]

    def forget(self) -> None:
        """The engine has dropped all blocks that it held."""
        self._loaded.clear()
        self._always = frozenset()
