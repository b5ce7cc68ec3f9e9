"""Writing to a Mooncake Store: blocks are sealed on a thread into the memory of the client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from prfaas.core.kv.blocks import BlockName
from prfaas.errors import TransferError
from prfaas.log_throttle import SaidOnce
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.mooncake.client import MooncakeClient
from prfaas.pool.shared.mooncake.codes import NO_SPACE, check
from prfaas.pool.shared.mooncake.memory import ClientMemory
from prfaas.pool.shared.mooncake.orders import Operation
from prfaas.pool.shared.mooncake.sealed_block import key_of, seal_block, sealed_bytes_max
from prfaas.pool.shared.site_keys import SiteKey
from prfaas.pool.shared.write_queue import Offer, WriteQueue
from prfaas.pool.store.origins import Matches, Origin
from prfaas.pool.store.tier_ports import StoredBlock

log = logging.getLogger(__name__)

Written = Callable[[BlockName, int, Origin], None]


class BlockWriter:
    """Seals and writes blocks.

    Args:
        client: Writes them.
        memory: Its memory.
        prefix: Of all keys.
        key: Seals new blocks.
        writer: Name of this pool node.
        metrics: Count what is written, and what is dropped.
        on_written: Called with every block in the store, its size and origin.
        clock_ns: Monotonic clock, nanoseconds.
    """

    def __init__(
        self,
        client: MooncakeClient,
        memory: ClientMemory,
        prefix: str,
        key: SiteKey,
        writer: str,
        metrics: PoolMetrics,
        on_written: Written,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._client, self._memory, self._prefix = client, memory, prefix
        self._key, self._writer, self._metrics = key, writer, metrics
        self._on_written = on_written
        self._queue = WriteQueue(memory.writes.capacity_bytes, metrics, clock_ns)
        self._turn = asyncio.Lock()
        self._puts: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "prfaas-mooncake-writer")
        self._said = SaidOnce(clock_ns)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._queue

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the store."""
        return self._queue.held_bytes

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block; `done` is called once it is sealed, or dropped.

        Returns:
            False if it is dropped at once: it is too large, too much waits, or the store takes
            nothing.
        """
        if sealed_bytes_max(len(block.data)) > self._memory.writes.capacity_bytes:
            self._metrics.blocks_dropped.labels(reason="shared_large").inc()
            return False
        return self._queue.offer(name, block, done)

    async def run(self) -> None:
        """Write offered blocks until cancelled."""
        while True:
            await self._queue.wait()
            await self._seal_queued()

    async def flush(self) -> None:
        """Write everything that waits."""
        await self._seal_queued()
        if self._puts:
            await asyncio.wait(self._puts)

    async def drop(self, matches: Matches) -> None:
        """Drop what waits with a matching origin; return once nothing else is under way."""
        self._queue.drop(matches)
        await self.flush()

    def close(self) -> None:
        """End the thread, and drop what waits."""
        for task in self._puts:
            task.cancel()
        self._queue.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _seal_queued(self) -> None:
        async with self._turn:
            while (offer := self._queue.take()) is not None:
                await self._seal(offer)

    async def _seal(self, offer: Offer) -> None:
        num_bytes = len(offer.block.data)
        size = sealed_bytes_max(num_bytes)
        try:
            offset = await self._memory.writes.taken(size)
        except asyncio.CancelledError:
            self._queue.take_back(offer)  # For the last flush.
            raise
        # As for the disk: an executor holds its arguments too long, so they are lent.
        lent = [(offer, self._memory.view(offset, size))]
        try:
            length = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._seal_lent, lent
            )
        except asyncio.CancelledError:
            if lent:
                lent.clear()
                self._memory.writes.give_back(offset, size)
                self._queue.take_back(offer)
            raise
        offer.done()
        task = asyncio.create_task(
            self._put(offer.name, num_bytes, offer.block.origin, offset, length)
        )
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)

    def _seal_lent(self, lent: list[tuple[Offer, memoryview]]) -> int:
        offer, into = lent.pop()
        return seal_block(self._key, offer.name, offer.block, self._writer, into)

    async def _put(
        self, name: BlockName, num_bytes: int, origin: Origin, offset: int, length: int
    ) -> None:
        size = sealed_bytes_max(num_bytes)
        try:
            self._queue.began()
            (code,) = await self._client.ask(
                Operation.PUT, [key_of(self._prefix, name)], offset, length
            )
            check(code)
        except TransferError as error:
            self._queue.failed(1)
            if self._said.is_new("write"):
                log.error("shared tier: blocks are not written: %s", error)
        else:
            self._queue.wrote(length)
            if code == NO_SPACE:
                self._metrics.blocks_dropped.labels(reason="shared_full").inc()
            else:
                self._on_written(name, num_bytes, origin)
        finally:
            self._memory.writes.give_back(offset, size)
            self._queue.forget([name], num_bytes)
