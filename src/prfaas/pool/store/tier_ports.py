"""Interfaces of the store: a stored block, the tier below memory, and observers of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.store.origins import LOCAL, Origin


@dataclass(slots=True)
class StoredBlock:
    """A block at rest.

    Attributes:
        data: Its bytes; never changed once stored.
        digest: BLAKE3 over name and bytes.
        origin: Where it came from.
        pins: Readers that need it to stay; a pinned block is not evicted.
    """

    data: bytearray | memoryview
    digest: bytes
    origin: Origin = LOCAL
    pins: int = 0


class StoreObserver(Protocol):
    """Observer of added and removed blocks in all tiers."""

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks can be found from now on."""

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks can no longer be found."""


class LowerTier(Protocol):
    """A tier below memory. Its methods never wait."""

    def __contains__(self, name: BlockName) -> bool:
        """Return True if it holds a block."""
        ...

    def names(self) -> Iterator[BlockName]:
        """Its contents."""
        ...

    def num_bytes(self, name: BlockName) -> int:
        """Size of a block that it holds."""
        ...

    def origin(self, name: BlockName) -> Origin:
        """Origin of one of its blocks."""
        ...

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Ask it to write a block; it calls `done` when the bytes are no longer needed.

        Returns:
            False if it cannot take more for now.
        """
        ...

    async def read(self, name: BlockName, into: memoryview) -> bytes | None:
        """Read and check a block; its digest, or None if it could not be had."""
        ...
