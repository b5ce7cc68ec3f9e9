"""Blocks that wait to be written to a shared tier, within one limit of bytes.

A block counts from when it is offered until it is written or dropped. What comes beyond the limit,
or while the tier takes nothing, is dropped and counted, so a slow tier costs no engine anything.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prfaas.core.cache.keep_rules import Matches
from prfaas.core.invariants import require
from prfaas.core.kv.blocks import BlockName
from prfaas.core.resilience.circuit_breaker import Breaker
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.tier_ports import StoredBlock


class BlockToWrite(NamedTuple):
    """A block to write."""

    name: BlockName
    block: StoredBlock
    """Its bytes; pinned in memory."""
    done: Callable[[], None]
    """Ends the pin. Called once, when the bytes are sealed or dropped."""


class SealingWriter(ABC):
    """Seals queued blocks on a thread, one at a time, and writes them in the background.

    Args:
        limit_bytes: Limit of `held_bytes`.
        metrics: Count what is dropped and what was written.
        thread: Its name.

    Attributes:
        held_bytes: Bytes of blocks that are queued or on their way.
    """

    def __init__(
        self,
        limit_bytes: int,
        metrics: PoolMetrics,
        thread: str,
    ) -> None:
        self._limit_bytes, self._metrics = limit_bytes, metrics
        self.held_bytes = 0
        self._breaker = Breaker()
        self._offers: deque[BlockToWrite] = deque()
        self._waiting: set[BlockName] = set()
        """Blocks that are queued or on their way."""
        self._work = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held while blocks are sealed."""
        self._writes: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._waiting

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block; `done` is called once it is sealed, or dropped.

        Returns:
            False if it is dropped at once: too much waits, or the tier takes nothing.
        """
        size = len(block.data)
        if not self._breaker.allows(time.monotonic_ns()):
            return self._refused("shared_down")
        if self.held_bytes and self.held_bytes + size > self._limit_bytes:
            return self._refused("shared_full")
        self._offers.append(BlockToWrite(name, block, done))
        self._waiting.add(name)
        self.held_bytes += size
        self._work.set()
        return True

    def _refused(self, reason: str) -> bool:
        self._metrics.blocks_dropped.labels(reason=reason).inc()
        return False

    async def run(self) -> None:
        """Write offered blocks until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            await self._seal_queued()

    async def flush(self) -> None:
        """Write everything that waits."""
        await self._seal_queued()
        self._finish_all()
        if self._writes:
            await asyncio.wait(self._writes)

    async def drop(self, matches: Matches) -> None:
        """Drop what waits with a matching origin; return once nothing else is under way."""
        self._drop_queued(matches)
        await self.flush()

    def close(self) -> None:
        """End the thread and all writes, and drop what waits."""
        for task in self._writes:
            task.cancel()
        self._drop_queued(lambda _: True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def validate(self) -> None:
        """Check the bytes of what waits or is on its way; AssertionError if they are less than
        those of what waits, or nobody's."""
        queued = sum(len(offer.block.data) for offer in self._offers)
        require(queued <= self.held_bytes, "bytes that wait")
        require(bool(self._waiting) == bool(self.held_bytes), "blocks that wait")

    # --- for writers ---

    async def _seal_queued(self) -> None:
        async with self._turn:
            while self._offers:
                await self._seal(self._offers.popleft())

    @abstractmethod
    async def _seal(self, offer: BlockToWrite) -> None:
        """Seal a block and call its `done`; if cancelled before, put it back at the front."""

    def _finish_all(self) -> None:  # noqa: B027 - packs wait for more, single blocks do not
        """Begin to write what is sealed and waits for more."""

    def _forget(self, names: Sequence[BlockName], num_bytes: int) -> None:
        """Blocks were written or dropped."""
        self._waiting.difference_update(names)
        self.held_bytes -= num_bytes

    def _drop_queued(self, matches: Matches) -> int:
        """Drop what is queued with a matching origin; return the number of blocks."""
        found = [offer for offer in self._offers if matches(offer.block.origin)]
        for offer in found:
            self._offers.remove(offer)
            self._forget([offer.name], len(offer.block.data))
            offer.done()
        return len(found)

    def _begin(self, write: Coroutine[None, None, None]) -> None:
        """Write in the background."""
        task = asyncio.create_task(write)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    def _wrote(self, num_bytes: int) -> None:
        """So many sealed bytes were written."""
        self._breaker.succeeded(time.monotonic_ns())
        self._metrics.count_shared("write", "ok")
        self._metrics.shared_bytes.labels(direction="written").inc(num_bytes)

    def _failed(self, num_blocks: int) -> None:
        """A write failed: its blocks are dropped."""
        self._breaker.failed(time.monotonic_ns())
        self._metrics.count_shared("write", "failed")
        self._metrics.blocks_dropped.labels(reason="shared_write").inc(num_blocks)
