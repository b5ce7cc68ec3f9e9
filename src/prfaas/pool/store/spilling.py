"""Spilling: blocks are offered to the disk while they are still in memory, so that making room
never waits for it. Those that would be evicted next go first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prfaas.core.kv.blocks import BlockName
from prfaas.pool.store.arena import Arena
from prfaas.pool.store.tier_ports import LowerTier, StoredBlock

CLEAN_RATIO, CLEAN_BYTES_MAX = 0.25, 512 << 20
"""Share of memory that is free or on disk as well: what may come before the disk has caught up. It
ends where looking through it would keep the event loop busy."""


class Spilling:
    """Blocks of a store on their way to its disk. Lives on the event loop of the store.

    Args:
        arena: Memory of the store.
        order: Returns their names in the order of eviction.
        arena_bytes: Returns the memory of the arena that a block takes.
        on_written: Called when the disk has written a block, or failed to.
    """

    def __init__(
        self,
        arena: Arena,
        blocks: Mapping[BlockName, StoredBlock],
        order: Callable[[], Iterator[BlockName]],
        arena_bytes: Callable[[BlockName], int],
        on_written: Callable[[], None],
    ) -> None:
        self._arena, self._blocks = arena, blocks
        self._order, self._arena_bytes = order, arena_bytes
        self._on_written = on_written
        self.disk: LowerTier | None = None
        """Without one, nothing is spilled."""
        self.clean_bytes = 0
        """Minimum bytes that can arrive before an eviction of a block that was not offered to the
        disk. The store lowers it with every block that arrives or is used; 0 if it is unknown."""
        self.writing: set[BlockName] = set()
        """Blocks that the disk has taken and not written yet; pinned. To be read only."""
        self._waiting: list[asyncio.Future[None]] = []
        self._is_refused = False
        """True if the disk took no more, and has written nothing since."""

    def spill(self, *, again: bool = False) -> None:
        """Offer to the disk what would be evicted next, if it is not there yet.

        Args:
            again: Even if it refused before and has written nothing since: it may have recovered.
        """
        wanted = min(int(self._arena.capacity_bytes * CLEAN_RATIO), CLEAN_BYTES_MAX)
        if self.disk is None or self.clean_bytes > wanted // 2:
            return
        if self._is_refused and not again:
            return
        self._is_refused = False
        clean = self._arena.capacity_bytes - self._arena.used_bytes
        for name in self._order():
            if clean >= wanted:
                break
            block = self._blocks[name]
            if name not in self.writing and name not in self.disk:
                if not self.disk.offer(name, block, partial(self._written, name, block)):
                    self._is_refused = True
                    return
                block.pins += 1
                self.writing.add(name)
            clean += self._arena_bytes(name)
        self.clean_bytes = clean

    async def has_written(self) -> bool:
        """Wait for the next block that the disk writes; False if it writes none."""
        self.clean_bytes = 0
        self.spill(again=True)
        if not self.writing:
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter
        return True

    def _written(self, name: BlockName, block: StoredBlock) -> None:
        block.pins -= 1
        self.writing.discard(name)
        self._is_refused = False
        if self.disk is None or name not in self.disk:
            self.clean_bytes = 0  # It failed: this block was counted as clean.
        self.spill()
        self._on_written()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
