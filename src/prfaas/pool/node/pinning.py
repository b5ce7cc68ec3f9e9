"""Pins of the blocks of one prompt: they stay in memory for a time.

A gateway repeats a pin before its end. So it survives a restart of the pool node, ends with the
gateway, and takes in blocks that have come since. Blocks that are only below are read into memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable

from prfaas.core.cache.keep_rules import Effect, OrderKey
from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, BlockName
from prfaas.logs import log_event
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.store.block_store import BlockStore
from prfaas.wire.messages.gateway import Order, OrderDone

log = logging.getLogger(__name__)

PIN_RATIO = 0.25
"""Share of memory that all pins may hold together."""
SLICE = 256
"""Hashes that are looked up at a stretch."""


class Pinning:
    """The blocks of the pins at one pool node; the rules of the store know when pins end.

    Args:
        store: Blocks in memory.
        layouts: Those whose blocks are looked for.
    """

    def __init__(
        self, store: BlockStore, layouts: KnownLayouts, clock_ns: Callable[[], int]
    ) -> None:
        self._store, self._layouts, self._clock_ns = store, layouts, clock_ns
        self._names: dict[OrderKey, set[BlockName]] = {}
        """Blocks that each pin holds."""
        self._turn = asyncio.Lock()

    async def handle(self, order: Order, gateway: str) -> OrderDone:
        """Pin the blocks of a prompt, repeat or end that, or count them."""
        async with self._turn:  # Bytes are counted against the limit one pin after the other.
            return await self._handle(order, gateway)

    def over(self, key: OrderKey) -> None:
        """A pin has ended; blocks that another one holds as well stay pinned."""
        names = self._names.pop(key, set())
        self._store.unpin(names.difference(*self._names.values()))

    async def _handle(self, order: Order, gateway: str) -> OrderDone:
        key = gateway, Effect.PIN, hashlib.sha256(order.hashes or b"").digest()
        if order.is_dry:
            found = [name async for name in self._found(order)]
            num_bytes = sum(map(self._store.num_bytes, found))
            return OrderDone(job=order.job, num_blocks=len(found), host_bytes=num_bytes)
        if not order.for_ns:
            was_in_force = self._store.rules.end(key)
            self.over(key)
            return OrderDone(job=order.job, was_in_force=was_in_force)
        until_ns = self._clock_ns() + order.for_ns
        if problem := self._store.rules.order(key, until_ns):
            return OrderDone(job=order.job, problem=problem)
        is_new = key not in self._names
        names = self._names.setdefault(key, set())
        num_left_out = num_bytes = 0
        async for name in self._found(order):
            if await self._hold(name, until_ns):
                names.add(name)
                num_bytes += self._store.num_bytes(name)
            else:
                num_left_out += 1
        names.intersection_update([name for name in names if self._store.order.is_pinned(name)])
        if is_new:
            fields = {"gateway": gateway, "blocks": len(names), "left_out": num_left_out}
            log_event(log, logging.INFO, "prefix_pinned", **fields)
        return OrderDone(
            job=order.job,
            num_blocks=len(names),
            host_bytes=num_bytes,
            num_left_out=num_left_out,
        )

    async def _hold(self, name: BlockName, until_ns: int) -> bool:
        """Pin a block, which is read into memory if need be; False if the limit does not allow."""
        if self._store.order.is_pinned(name):
            return self._store.pin(name, until_ns)
        limit = self._store.room.capacity_bytes * PIN_RATIO
        if self._store.order.pinned_bytes + self._store.num_bytes(name) > limit:
            return False
        if await self._store.fetch(*name) is None:
            return False
        return self._store.pin(name, until_ns)

    async def _found(self, order: Order) -> AsyncIterator[BlockName]:
        """Blocks of the prompt in any tier, the first ones first."""
        data = order.hashes or b""
        for number, at in enumerate(range(0, len(data), HASH_BYTES)):
            for layout_id, group in self._layouts.groups():
                name = layout_id, BlockKey(group, data[at : at + HASH_BYTES])
                origin = self._store.origin_of(name)
                if origin is not None and origin.tenant in ("", order.tenant):
                    yield name
            if number % SLICE == 0:
                await asyncio.sleep(0)  # Others are served meanwhile.
