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
    """A block to write.

    Attributes:
        block: Its bytes; pinned in memory.
        done: Ends the pin. Called once, when the bytes are sealed or dropped.
    """

    name: BlockName
    block: StoredBlock
    done: Callable[[], None]


class WriteQueue:
    """The queue, and the breaker of writing.

    Args:
        limit_bytes: Limit of `held_bytes`.
        metrics: Count what is dropped and what was written.
    """

    def __init__(
        self,
        limit_bytes: int,
        metrics: PoolMetrics,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._limit_bytes, self._metrics, self._clock_ns = limit_bytes, metrics, clock_ns
        self._breaker = Breaker()
        self._offers: deque[BlockToWrite] = deque()
        self._waiting: set[BlockName] = set()
        """Blocks that are queued or on their way."""
        self._work = asyncio.Event()
        self.held_bytes = 0
        """Bytes of blocks that are queued or on their way."""

    def __contains__(self, name: BlockName) -> bool:
        return name in self._waiting

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block.

        Returns:
            False if it is dropped at once: too much waits, or the tier takes nothing.
        """
        size = len(block.data)
        if not self._breaker.allows(self._clock_ns()):
            return self._dropped("shared_down")
        if self.held_bytes and self.held_bytes + size > self._limit_bytes:
            return self._dropped("shared_full")
        self._offers.append(BlockToWrite(name, block, done))
        self._waiting.add(name)
        self.held_bytes += size
        self._work.set()
        return True

    async def wait(self) -> None:
        """Wait until blocks were offered since the last call."""
        await self._work.wait()
        self._work.clear()

    def take(self) -> BlockToWrite | None:
        """The block that waits longest; None if none waits."""
        return self._offers.popleft() if self._offers else None

    def take_back(self, offer: BlockToWrite) -> None:
        """Queue a block that was taken and not sealed, before the others."""
        self._offers.appendleft(offer)

    def forget(self, names: Sequence[BlockName], num_bytes: int) -> None:
        """Blocks were written or dropped."""
        self._waiting.difference_update(names)
        self.held_bytes -= num_bytes

    def drop(self, matches: Matches) -> int:
        """Drop what is queued with a matching origin; return the number of blocks."""
        found = [offer for offer in self._offers if matches(offer.block.origin)]
        for offer in found:
            self._offers.remove(offer)
            self.forget([offer.name], len(offer.block.data))
            offer.done()
        return len(found)

    def close(self) -> None:
        """Drop what is queued."""
        self.drop(lambda _: True)

    def validate(self) -> None:
        """Check the bytes of what waits or is on its way.

        Raises:
            AssertionError: They are less than those of what waits, or nobody's.
        """
        queued = sum(len(offer.block.data) for offer in self._offers)
        require(queued <= self.held_bytes, "bytes that wait")
        require(bool(self._waiting) == bool(self.held_bytes), "blocks that wait")

    # --- writing ---

    def began(self) -> None:
        """Something is being written."""
        self._breaker.began(self._clock_ns())

    def wrote(self, num_bytes: int) -> None:
        """It was written: so many sealed bytes."""
        self._breaker.succeeded(self._clock_ns())
        self._metrics.count_shared("write", "ok")
        self._metrics.shared_bytes.labels(direction="written").inc(num_bytes)

    def failed(self, num_blocks: int) -> None:
        """It was not: blocks are dropped."""
        self._breaker.failed(self._clock_ns())
        self._metrics.count_shared("write", "failed")
        self._metrics.blocks_dropped.labels(reason="shared_write").inc(num_blocks)

    def _dropped(self, reason: str) -> bool:
        self._metrics.blocks_dropped.labels(reason=reason).inc()
        return False


class SealingWriter(ABC):
    """Seals queued blocks on a thread, one at a time, and writes them in the background.

    Args:
        queue: Blocks to write.
    """

    def __init__(self, queue: WriteQueue, thread: str) -> None:
        self._queue = queue
        self._turn = asyncio.Lock()
        """Held while blocks are sealed."""
        self._writes: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._queue

    @property
    def held_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._queue.held_bytes

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block; `done` is called once it is sealed, or dropped.

        Returns:
            False if it is dropped at once: too much waits, or the tier takes nothing.
        """
        return self._queue.offer(name, block, done)

    def validate(self) -> None:
        """Check what waits."""
        self._queue.validate()

    async def run(self) -> None:
        """Write offered blocks until cancelled."""
        while True:
            await self._queue.wait()
            await self._seal_queued()

    async def flush(self) -> None:
        """Write everything that waits."""
        await self._seal_queued()
        self._finish_all()
        if self._writes:
            await asyncio.wait(self._writes)

    async def drop(self, matches: Matches) -> None:
        """Drop what waits with a matching origin; return once nothing else is under way."""
        self._queue.drop(matches)
        await self.flush()

    def close(self) -> None:
        """End the thread and all writes, and drop what waits."""
        for task in self._writes:
            task.cancel()
        self._queue.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, write: Coroutine[None, None, None]) -> None:
        """Write in the background."""
        task = asyncio.create_task(write)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _seal_queued(self) -> None:
        async with self._turn:
            while (offer := self._queue.take()) is not None:
                await self._seal(offer)

    @abstractmethod
    async def _seal(self, offer: BlockToWrite) -> None:
        """Seal a block and call its `done`; if cancelled before, take it back into the queue."""

    def _finish_all(self) -> None:  # noqa: B027 - packs wait for more, single blocks do not
        """Begin to write what is sealed and waits for more."""
