"""Pins of the blocks of one prompt: they stay in memory for a time.

A gateway repeats a pin before its end. So it survives a restart of the pool node, ends with the
gateway, and takes in blocks that have come since. Blocks that are only below are read into memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, BlockName
from prfaas.logs import log_event
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.store.block_store import BlockStore
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.gateway import Pinned, PinPrefix

log = logging.getLogger(__name__)

PIN_RATIO = 0.25
"""Share of memory that all pins may hold together."""
PINS_MAX = 64
"""Pins of one gateway; more are refused."""
WAITING_MAX = 256
"""Orders that wait for others."""
SLICE = 256
"""Hashes that are looked up at a stretch."""


@dataclass(slots=True)
class _Pin:
    """A pin: its end, and the blocks that it holds."""

    until_ns: int
    names: set[BlockName] = field(default_factory=set)


class PrefixPinning:
    """The pins at one pool node.

    Args:
        store: Blocks in memory.
        layouts: Those whose blocks are looked for.
    """

    def __init__(
        self,
        store: BlockStore,
        layouts: KnownLayouts,
        clock_ns: Callable[[], int],
    ) -> None:
        self._store, self._layouts, self._clock_ns = store, layouts, clock_ns
        self._pins: dict[tuple[str, bytes], _Pin] = {}
        """By gateway and digest of the hashes."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def asked(self, message: PinPrefix, gateway: str, answer: Callable[[Message], None]) -> None:
        """A gateway pins the blocks of a prompt, repeats or ends that, or counts them."""
        if len(self._tasks) >= WAITING_MAX:
            problem = f"{WAITING_MAX} orders wait already; try again"
            answer(Pinned(job=message.job, num_blocks=0, num_bytes=0, problem=problem))
            return
        task = asyncio.create_task(self._answer(message, gateway, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def expire(self) -> None:
        """End the pins whose time is over."""
        now_ns = self._clock_ns()
        for key in [key for key, pin in self._pins.items() if pin.until_ns <= now_ns]:
            self._end(key)

    async def _answer(
        self, message: PinPrefix, gateway: str, answer: Callable[[Message], None]
    ) -> None:
        async with self._turn:  # Bytes are counted against the limit one pin after the other.
            answer(await self._handle(message, gateway))

    async def _handle(self, message: PinPrefix, gateway: str) -> Pinned:
        key = gateway, hashlib.sha256(message.hashes).digest()
        if not message.is_dry and not message.for_ns:
            self._end(key)
            return Pinned(job=message.job, num_blocks=0, num_bytes=0)
        if message.is_dry:
            names = [name async for name in self._found(message)]
            num_bytes = sum(map(self._store.num_bytes, names))
            return Pinned(job=message.job, num_blocks=len(names), num_bytes=num_bytes)
        num_pins = sum(name == gateway for name, _ in self._pins)
        if key not in self._pins and num_pins >= PINS_MAX:
            problem = f"{gateway} has {num_pins} pins here, the limit; end one"
            return Pinned(job=message.job, num_blocks=0, num_bytes=0, problem=problem)
        return await self._pin(message, key)

    async def _pin(self, message: PinPrefix, key: tuple[str, bytes]) -> Pinned:
        is_new = key not in self._pins
        until_ns = self._clock_ns() + message.for_ns
        pin = self._pins.setdefault(key, _Pin(until_ns))
        pin.until_ns = until_ns
        num_left_out = num_bytes = 0
        async for name in self._found(message):
            if await self._hold(name, until_ns):
                pin.names.add(name)
                num_bytes += self._store.num_bytes(name)
            else:
                num_left_out += 1
        pin.names = {name for name in pin.names if self._store.order.is_pinned(name)}
        if is_new:
            fields = {"gateway": key[0], "blocks": len(pin.names), "left_out": num_left_out}
            log_event(log, logging.INFO, "prefix_pinned", **fields)
        return Pinned(
            job=message.job,
            num_blocks=len(pin.names),
            num_bytes=num_bytes,
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

    async def _found(self, message: PinPrefix) -> AsyncIterator[BlockName]:
        """Blocks of the prompt in any tier, the first ones first."""
        data = message.hashes
        for number, at in enumerate(range(0, len(data), HASH_BYTES)):
            for layout_id, group in self._layouts.groups():
                name = layout_id, BlockKey(group, data[at : at + HASH_BYTES])
                origin = self._store.origin_of(name)
                if origin is not None and origin.tenant in ("", message.tenant):
                    yield name
            if number % SLICE == 0:
                await asyncio.sleep(0)  # Others are served meanwhile.

    def _end(self, key: tuple[str, bytes]) -> None:
        """End a pin; blocks that another one holds as well stay pinned."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            others = set[BlockName]().union(*(each.names for each in self._pins.values()))
            self._store.unpin(pin.names - others)
