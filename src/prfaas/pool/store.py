"""KV blocks in host memory, up to a byte limit, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.blocks import BlockKey


@dataclass(slots=True)
class StoredBlock:
    """A block at rest.

    Attributes:
        data: Its bytes; never changed once stored.
        digest: BLAKE3 over name and bytes.
        pins: Readers that need it to stay; a pinned block is not evicted.
    """

    data: bytearray | memoryview
    digest: bytes
    pins: int = 0


class StoreObserver(Protocol):
    """Who wants to know what comes and goes."""

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks can be found from now on."""

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks can no longer be found."""


class BlockStore:
    """Blocks by layout and key.

    Args:
        capacity_bytes: Hard limit on the bytes of all blocks together.
        observer: Told of every block that comes or goes, in order.
    """

    def __init__(self, capacity_bytes: int, observer: StoreObserver) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._observer = observer
        self._blocks: OrderedDict[tuple[bytes, BlockKey], StoredBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: tuple[bytes, BlockKey]) -> bool:
        return name in self._blocks

    @property
    def num_pinned(self) -> int:
        """Blocks that are not evicted because somebody reads them."""
        return sum(block.pins > 0 for block in self._blocks.values())

    def names(self) -> Iterator[tuple[bytes, BlockKey]]:
        """Names of all blocks, the least recently used first."""
        return iter(self._blocks)

    def get(self, layout_id: bytes, key: BlockKey) -> StoredBlock | None:
        """A block, which counts as used now; None if it is not there."""
        block = self._blocks.get((layout_id, key))
        if block is not None:
            self._blocks.move_to_end((layout_id, key))
        return block

    def touch(self, layout_id: bytes, keys: Iterable[BlockKey]) -> None:
        """Count blocks as used now; unknown ones are ignored."""
        for key in keys:
            if (layout_id, key) in self._blocks:
                self._blocks.move_to_end((layout_id, key))

    def put(
        self, layout_id: bytes, key: BlockKey, data: bytearray | memoryview, digest: bytes
    ) -> bool:
        """Keep a block; one that is there already is kept as it is.

        Returns:
            False if no room can be made because everything else is pinned, or the block alone is
            over the limit.
        """
        if self.get(layout_id, key) is not None:
            return True
        if not self._make_room(len(data)):
            return False
        self._blocks[(layout_id, key)] = StoredBlock(data, digest)
        self.used_bytes += len(data)
        self._observer.stored(layout_id, [key])
        return True

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self.capacity_bytes:
            return False
        unpinned = (name for name, block in self._blocks.items() if not block.pins)
        victims: list[tuple[bytes, BlockKey]] = []
        free = self.capacity_bytes - self.used_bytes
        while free < num_bytes:
            victim = next(unpinned, None)
            if victim is None:
                return False
            victims.append(victim)
            free += len(self._blocks[victim].data)
        for layout_id, key in victims:
            self.used_bytes -= len(self._blocks.pop((layout_id, key)).data)
            self._observer.evicted(layout_id, [key])
        return True
