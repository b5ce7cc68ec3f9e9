"""A scripted engine: vLLM's half of the conversation with a pool node, over real shared memory."""

import asyncio
import dataclasses
import functools
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.codec.codecs import CodedSegment, Form, SegmentMode
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout, Plane
from prfaas.core.kv.shipping import manifest_of_keys
from prfaas.engines.block_requests import BlockRequests, BlockState, JobDone
from prfaas.engines.pool_client import PoolConnection
from prfaas.pool.codec.rounding import round_block
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.codec import AnyMessage
from prfaas.wire.messages.engine import EngineHello, Load, Push, PushDone, Store
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.layouts import layout_spec

ATTENTION_BYTES, STATE_BYTES = (384 << 10) + 16, 100_000
PADDING = 0xEE
EXTENTS = {0: [(64, ATTENTION_BYTES - 16), (ATTENTION_BYTES + 100, 16)], 1: [(1000, STATE_BYTES)]}
ROW_BYTES = ATTENTION_BYTES + 116 + 12
BLOCK_BYTES = {0: ATTENTION_BYTES, 1: STATE_BYTES}
NUM_ROWS = 48
LAYOUT = Layout(
    b"D" * 32,
    16,
    "0",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, ATTENTION_BYTES),
        CacheGroup(1, GroupKind.LINEAR_STATE, 64, STATE_BYTES),
    ),
)
POLL_S = 0.002


@functools.lru_cache(256)
def content(key: BlockKey) -> bytes:
    """The one right content of a block."""
    name = bytes([key.group]) + key.block_hash
    return hashlib.shake_128(name).digest(BLOCK_BYTES[key.group])


@dataclass(frozen=True)
class Shape:
    """Shared memory of an engine: layout, rows and their number.

    Attributes:
        layout: Its blocks.
        extents: By cache group: offset and length of the parts of a row that carry a block.
        row_bytes: Size of a row.
        num_rows: How many there are; no job may have more blocks.
        content: The one right content of a block.
    """

    layout: Layout
    extents: dict[int, list[tuple[int, int]]]
    row_bytes: int
    num_rows: int
    content: Callable[[BlockKey], bytes]


SHAPE = Shape(LAYOUT, EXTENTS, ROW_BYTES, NUM_ROWS, content)


@functools.lru_cache(256)
def numbers(key: BlockKey) -> bytes:
    """The same with attention in bfloat16, between 2**-8 and 1 in magnitude: a link can code it."""
    data = bytearray(content(key))
    if key.group == 0:
        upper = data[1::2].translate(bytes(0x3C | value & 0x83 for value in range(256)))
        data[1::2] = upper
    return bytes(data)


CODED_SHAPE = dataclasses.replace(
    SHAPE,
    layout=dataclasses.replace(
        LAYOUT,
        groups=(
            dataclasses.replace(LAYOUT.groups[0], planes=(Plane("bfloat16", ATTENTION_BYTES),)),
            LAYOUT.groups[1],
        ),
    ),
    content=numbers,
)


@functools.lru_cache(256)
def exact_in_fp8(key: BlockKey) -> bytes:
    """The same with attention that `fp8` keeps to the bit, so that wrong bytes are found."""
    data = numbers(key)
    if key.group:
        return data
    form = Form((CodedSegment(SegmentMode.FP8, (len(data) // 2, 0, 0, 0)),))
    into = memoryview(bytearray(len(data)))
    round_block(form, memoryview(data), into)
    return bytes(into)


ROUNDED_SHAPE = dataclasses.replace(CODED_SHAPE, content=exact_in_fp8)


class WrongBytesError(AssertionError):
    """A pool node said that a row holds a block, and it does not."""


class ScriptedEngine:
    """Stores and loads blocks at one pool node."""

    def __init__(self, name: str, socket_path: Path, shape: Shape = SHAPE) -> None:
        self._shape = shape
        num_bytes = shape.row_bytes * shape.num_rows
        self.descriptor = os.memfd_create(name)
        os.truncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)
        self._rows = asyncio.Lock()
        """Held by the one job that uses the rows."""
        self._jobs = iter(range(1_000_000, 1 << 40))
        self._done: dict[int, JobDone] = {}
        self.requests = BlockRequests(self._send, time.monotonic_ns)
        hello = EngineHello(
            engine=name,
            layout=layout_spec(shape.layout),
            row_bytes=shape.row_bytes,
            num_rows=shape.num_rows,
            extents={group: list(extents) for group, extents in shape.extents.items()},
        )
        self.client = PoolConnection(
            socket_path, hello, self.descriptor, self._on_message, self.requests.on_lost
        )

    async def store(self, keys: list[BlockKey], transfer: bytes | None) -> bool:
        """Compute blocks into rows and hand them over."""
        message = Store(
            job=next(self._jobs),
            keys=wire_keys(keys),
            rows=list(range(len(keys))),
            transfer_id=transfer,
            pushed=[transfer is not None] * len(keys),
        )
        async with self._rows:
            for row, key in enumerate(keys):
                self._write(row, key)
            return (await self._finish(message)).ok

    async def load(self, keys: list[BlockKey]) -> int:
        """Take blocks back, and compare what is said to be there.

        Returns:
            How many are there.

        Raises:
            WrongBytesError: One is there and is wrong, or something beside it was written to.
        """
        rows = list(range(len(keys)))
        message = Load(job=next(self._jobs), keys=wire_keys(keys), rows=rows)
        async with self._rows:
            self.memory[:] = bytes([PADDING]) * len(self.memory)
            loaded = (await self._finish(message)).loaded or [False] * len(keys)
            for row, key, is_there in zip(rows, keys, loaded, strict=True):
                if is_there and self._row(row) != self._expected(key):
                    raise WrongBytesError(f"cache group {key.group}, block {key.block_hash.hex()}")
        return sum(loaded)

    async def find(
        self, request: str, keys: list[BlockKey], transfer: bytes, wait_s: float
    ) -> list[BlockKey]:
        """Ask for blocks as vLLM's scheduler does, until none is on its way."""
        self.requests.begin(request, transfer, "prfaas-pool", round(wait_s * 1e9))
        try:
            while True:
                answers = [self.requests.look_up(request, key) for key in wire_keys(keys)]
                if BlockState.WAIT not in answers:
                    break
                self.requests.flush()
                await asyncio.sleep(POLL_S)
        finally:
            self.requests.end(request)
        return [key for key, answer in zip(keys, answers, strict=True) if answer is BlockState.HIT]

    def push(self, transfer: bytes, ticket: bytes, keys: list[BlockKey]) -> bool:
        blocks = manifest_of_keys(keys)
        return self._send(Push(transfer_id=transfer, peer="pd-pool", ticket=ticket, blocks=blocks))

    def push_done(self, transfer: bytes, rest: Iterable[BlockKey] = ()) -> bool:
        return self._send(PushDone(transfer_id=transfer, rest=wire_keys(rest)))

    def close(self) -> None:
        self.client.close()
        self.memory.close()
        os.close(self.descriptor)

    async def _finish(self, job: Store | Load) -> JobDone:
        self.requests.submit(job)
        while job.job not in self._done:
            self._done |= {done.job: done for done in self.requests.take_done()}
            await asyncio.sleep(POLL_S)
        return self._done.pop(job.job)

    def _send(self, message: Message) -> bool:
        return self.client.send(message)

    def _on_message(self, message: AnyMessage) -> None:
        self.requests.on_message(message)

    def _write(self, row: int, key: BlockKey) -> None:
        at = row * self._shape.row_bytes
        self.memory[at : at + self._shape.row_bytes] = self._expected(key)

    def _row(self, row: int) -> bytes:
        return self.memory[row * self._shape.row_bytes : (row + 1) * self._shape.row_bytes]

    def _expected(self, key: BlockKey) -> bytes:
        row, data = bytearray([PADDING]) * self._shape.row_bytes, self._shape.content(key)
        for offset, length in self._shape.extents[key.group]:
            row[offset : offset + length], data = data[:length], data[length:]
        return bytes(row)
