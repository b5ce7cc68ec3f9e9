"""Copies of blocks between engines' rows and the store, with digests, on a separate thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import BlockKey
from prfaas.errors import PeerError
from prfaas.pool.engine.engine_server import EngineSession
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.origins import PURGED
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import block_digest

BATCH_BYTES, BATCH_RATIO = 8 << 20, 1 / 8
"""Bytes that are copied at a time."""
LEFT = "the engine disconnected before its rows were copied"
NamedRow = tuple[BlockKey, int]
Row = tuple[BlockKey, int, memoryview]
"""A row, and the buffer that it is copied to or from."""


class EngineCopies:
    """Copies blocks without blocking the event loop.

    An engine that has left may use its rows for something else, and a pool node that stood still
    may hear of that late. So what was read counts only if the engine is still there afterwards, and
    nothing is written to an engine that is not.
    """

    def __init__(self, store: BlockStore, metrics: PoolMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-copy")

    def close(self) -> None:
        """End the thread after the running copies."""
        self._thread.shutdown(cancel_futures=True)

    def batches(self, engine: EngineSession, named: Sequence[NamedRow]) -> Iterator[list[NamedRow]]:
        """Rows in parts for one call of `take`."""
        limit = min(BATCH_BYTES, int(self._store.room.capacity_bytes * BATCH_RATIO))
        part: list[NamedRow] = []
        num_bytes = 0
        for key, row in named:
            size = engine.memory.block_bytes(key.group)
            if part and num_bytes + size > limit:
                yield part
                part, num_bytes = [], 0
            part.append((key, row))
            num_bytes += size
        if part:
            yield part

    async def take(
        self,
        engine: EngineSession,
        named: Sequence[NamedRow],
        origin: Origin,
        *,
        spare_leased: bool = False,
    ) -> list[StoredBlock | None]:
        """Keep rows as blocks; PeerError if the engine has disconnected, or its memory differs from
        its hello.

        Args:
            engine: Owner of the rows.
            named: Rows that were checked, with the names of the blocks in them.
            origin: Where the engine has these blocks from.
            spare_leased: Evict no leased block.

        Returns:
            The blocks, each pinned once; None if memory is full, or the origin is barred.
        """
        layout_id = engine.layout.layout_id
        blocks = [self._known(engine, key) for key, _ in named]
        try:
            tenant = origin.tenant
            new = self._buffers(engine, named, blocks, tenant, spare_leased=spare_leased)
            digests = await self._run(_read, engine, [(*named[at], new[at]) for at in new])
            for at, digest in zip(new, digests, strict=True):
                key, _ = named[at]
                kept = self._store.keep(layout_id, key, new[at], digest, origin)
                if kept is None:
                    self._metrics.blocks_dropped.labels(reason=PURGED).inc()
                elif len(kept.data) == engine.memory.block_bytes(key.group):
                    blocks[at] = _pin(kept)
                    self._metrics.blocks_stored.labels(group=key.group).inc()
        except BaseException:
            release(blocks)
            raise
        return blocks

    async def give(
        self, engine: EngineSession, named: Sequence[NamedRow], blocks: Sequence[StoredBlock | None]
    ) -> bytes:
        """Copy blocks into rows; PeerError if the engine has disconnected, or its memory differs
        from its hello.

        Returns:
            One byte a row: 1 if it now holds the block, 0 where that is missing or of another size.
        """
        sizes = [engine.memory.block_bytes(key.group) for key, _ in named]
        good = [
            block if block is not None and len(block.data) == size else None
            for block, size in zip(blocks, sizes, strict=True)
        ]
        held = [block and _pin(block) for block in good]
        try:
            work = [(*row, block.data) for row, block in zip(named, good, strict=True) if block]
            await self._run(_write, engine, work)
        finally:
            release(held)
        for key, _, _ in work:
            self._metrics.blocks_loaded.labels(group=key.group).inc()
        return bytes(block is not None for block in good)

    def _known(self, engine: EngineSession, key: BlockKey) -> StoredBlock | None:
        """The block if it is in memory, pinned. One of another size is dropped."""
        layout_id = engine.layout.layout_id
        block = self._store.get(layout_id, key)
        if block is None or len(block.data) == engine.memory.block_bytes(key.group):
            return block and _pin(block)
        self._store.discard(layout_id, key)
        return None

    def _buffers(
        self,
        engine: EngineSession,
        named: Sequence[NamedRow],
        blocks: Sequence[StoredBlock | None],
        tenant: str,
        *,
        spare_leased: bool,
    ) -> dict[int, memoryview]:
        """Memory for missing blocks, by their place; those without free memory are left out."""
        buffers: dict[int, memoryview] = {}
        for at, (key, _) in enumerate(named):
            if blocks[at] is not None:
                continue
            size = engine.memory.block_bytes(key.group)
            buffer = self._store.room.allocate(size, tenant=tenant, spare_leased=spare_leased)
            if buffer is None:
                self._metrics.blocks_dropped.labels(reason="no_room").inc()
            else:
                buffers[at] = buffer
        return buffers

    async def _run(
        self, copy: Callable[[EngineSession, list[Row]], list[bytes]], *about: Any
    ) -> list[bytes]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, copy, *about)


def release(blocks: Sequence[StoredBlock | None]) -> None:
    """Unpin blocks."""
    for block in blocks:
        if block is not None:
            block.pins -= 1


def _pin(block: StoredBlock) -> StoredBlock:
    block.pins += 1
    return block


def _read(engine: EngineSession, rows: list[Row]) -> list[bytes]:
    """On the thread: fill buffers from rows, and digest them."""
    digests = []
    for key, row, buffer in rows:
        engine.memory.read(key, row, buffer)
        digests.append(block_digest(engine.layout.layout_id, key, buffer))
    if engine.has_left:
        raise PeerError(LEFT)
    return digests


def _write(engine: EngineSession, rows: list[Row]) -> list[bytes]:
    """On the thread: fill rows from blocks."""
    for key, row, data in rows:
        if engine.has_left:
            raise PeerError(LEFT)
        engine.memory.write(key, row, data)
    return []
