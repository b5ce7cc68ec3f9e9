"""Who goes first when a tier is full: one interface, and least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Keeps an order over what a tier holds. Told of everything that happens to it."""

    def added(self, key: K) -> None:
        """It came; it was not there."""

    def used(self, key: K) -> None:
        """It served a hit."""

    def removed(self, key: K) -> None:
        """It is gone."""

    def order(self) -> Iterator[K]:
        """All there is, what should go first at the front. Valid until the next change."""
        ...


class LeastRecentlyUsed(EvictionPolicy[K]):
    """What was not used for longest goes first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()

    def added(self, key: K) -> None:
        """It counts as used now."""
        self._keys[key] = None

    def used(self, key: K) -> None:
        """It goes last from now on."""
        self._keys.move_to_end(key)

    def removed(self, key: K) -> None:
        """Forget it."""
        del self._keys[key]

    def order(self) -> Iterator[K]:
        """From the least to the most recently used."""
        return iter(self._keys)
