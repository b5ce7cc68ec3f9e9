"""Writing to a Mooncake Store: blocks are sealed on a thread into the memory of the client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import BlockName
from prfaas.errors import TransferError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.keys.site_keys import SiteKey
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.mooncake.client import MooncakeClient
from prfaas.pool.shared.mooncake.known_blocks import Known, KnownBlocks
from prfaas.pool.shared.mooncake.orders import NO_SPACE, StoreOperation, check
from prfaas.pool.shared.mooncake.sealed_block import key_of, seal_block, sealed_bytes_max
from prfaas.pool.shared.shown_blocks import TierHealth
from prfaas.pool.shared.write_queue import BlockToWrite, SealingWriter
from prfaas.pool.store.tier_ports import StoredBlock

log = logging.getLogger(__name__)


class BlockWriter(SealingWriter):
    """Seals and writes blocks.

    Args:
        key: Seals new blocks.
        writer: Name of this pool node.
        blocks: Those in the store; gets every one that is written.
    """

    def __init__(
        self,
        client: MooncakeClient,
        key: SiteKey,
        writer: str,
        blocks: KnownBlocks,
        health: TierHealth,
        metrics: PoolMetrics,
    ) -> None:
        self._memory = client.memory
        limit_bytes = self._memory.writes.capacity_bytes
        super().__init__(limit_bytes, metrics, "prfaas-mooncake-writer")
        self._client, self._key, self._writer = client, key, writer
        self._blocks, self._health = blocks, health
        self._said = LogThrottle()

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        """Queue a block; `done` is called once it is sealed, or dropped.

        Returns:
            False if it is dropped at once: it is too large, too much waits, or the store takes
            nothing.
        """
        if sealed_bytes_max(len(block.data)) > self._memory.writes.capacity_bytes:
            self._metrics.blocks_dropped.labels(reason="shared_large").inc()
            return False
        return super().offer(name, block, done)

    async def _seal(self, offer: BlockToWrite) -> None:
        num_bytes = len(offer.block.data)
        size = sealed_bytes_max(num_bytes)
        try:
            offset = await self._memory.writes.taken(size)
        except asyncio.CancelledError:
            self._offers.appendleft(offer)  # For the last flush.
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
                self._offers.appendleft(offer)
            raise
        offer.done()
        self._begin(self._put(offer.name, num_bytes, offer.block.origin, offset, length))

    def _seal_lent(self, lent: list[tuple[BlockToWrite, memoryview]]) -> int:
        offer, into = lent.pop()
        return seal_block(self._key, offer.name, offer.block, self._writer, into)

    async def _put(
        self, name: BlockName, num_bytes: int, origin: Origin, offset: int, length: int
    ) -> None:
        size = sealed_bytes_max(num_bytes)
        try:
            self._breaker.began(time.monotonic_ns())
            (code,) = await self._client.ask(
                StoreOperation.PUT, [key_of(self._client.prefix, name)], offset, length
            )
            check(code)
        except TransferError as error:
            self._failed(1)
            if self._said.is_new("write"):
                log.error("shared tier: blocks are not written: %s", error)
        else:
            self._wrote(length)
            if code == NO_SPACE:
                self._metrics.blocks_dropped.labels(reason="shared_full").inc()
            else:
                is_new = name not in self._blocks
                self._health.gone(self._blocks.set(name, Known(num_bytes, origin, is_own=True)))
                self._health.found([name] if is_new else [])
        finally:
            self._memory.writes.give_back(offset, size)
            self._forget([name], num_bytes)
