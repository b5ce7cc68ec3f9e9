"""Two pool nodes on loopback, and what talks to them: engines, a gateway, a link to cut."""

import asyncio
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.shipping import manifest_digest
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.core.transfer.tickets import Ticket
from prfaas.engines.block_requests import BlockRequests, JobDone
from prfaas.engines.pool_client import LIMITS, ClientLimits, PoolConnection
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.process.process import PoolProcess, PoolProcessSettings
from prfaas.wire.channel import Channel, keep_alive
from prfaas.wire.fragments import ReceivedBlock, encode_prefix
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.codec import AnyMessage, decode, encode
from prfaas.wire.messages.engine import (
    EngineHello,
    Load,
    Lookup,
    LookupDone,
    Push,
    PushDone,
    Store,
    TransferOver,
)
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import Subscribe
from prfaas.wire.messages.layouts import layout_spec
from prfaas.wire.messages.link import Join, Offer, PoolHello, Resumed
from prfaas.wire.tickets import TicketSigner

LOOPBACK = "127.0.0.1"
MEMORY = 1 << 20
BUDGET = 1 << 14
"""Bytes that a ticket allows unless a test says otherwise; a prompt has a tenth of it."""
ROW_BYTES, NUM_ROWS = 512, 64
PADDING = 0xEE
EXTENTS = {0: [(0, 100), (200, 28)], 1: [(120, 64)]}
LAYOUT = Layout(
    b"L" * 32,
    16,
    "0",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 128),
        CacheGroup(1, GroupKind.LINEAR_STATE, 64, 64),
    ),
)
PROMPT = [BlockKey(0, bytes([n]) * 32) for n in range(8)] + [
    BlockKey(1, bytes([n]) * 32) for n in (3, 7)
]
"""A prompt of 128 tokens: eight blocks of attention, two checkpoints of state."""

HASHES = [bytes([n]) * 32 for n in range(256)] + [n.to_bytes(32, "big") for n in range(1, 400)]
NAMED = {group: b"".join(HASHES) for group in (0, 1)}
"""The list of blocks of every ticket, unless a test is about lists: all that tests use."""

M = TypeVar("M", bound=AnyMessage)


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until `condition` holds; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - the conditions are attributes, nobody signals them
        await asyncio.sleep(0.001)


def content(key: BlockKey) -> bytes:
    """The bytes of a block."""
    size = sum(length for _, length in EXTENTS[key.group])
    return hashlib.shake_128(bytes([key.group]) + key.block_hash).digest(size)


class Site:
    """One running pool node."""

    def __init__(self, settings: PoolProcessSettings, kernels: Kernels = KERNELS) -> None:
        self.process = PoolProcess(settings, kernels)
        self.node = self.process.node
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self.process.run(self._ready.set))

    async def ready(self) -> None:
        opened = asyncio.create_task(self._ready.wait())
        await asyncio.wait({opened, self._task}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if self._task.done():
            self._task.result()

    async def kill(self) -> None:
        if self.is_running:
            self.node.validate()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    @property
    def port(self) -> int:
        return self.node.link_port.port

    def held(self) -> set[BlockKey]:
        return {key for _, key in self.node.store.names()}

    def metric(self, name: str, **labels: str) -> float:
        return self.node.metrics.registry.get_sample_value(f"prfaas_{name}", labels) or 0.0

    def check(self) -> None:
        """Check the invariants of an idle node."""
        node = self.node
        node.validate()
        blocks = [block for name in list(node.store.names()) if (block := node.store.get(*name))]
        assert [block.pins for block in blocks] == [0] * len(blocks)
        assert node.link_room.num_open == 0


FACTS = {"model.weights": "ab12", "group.0.dtypes": "float32"}


class Engine:
    """An engine's half of the conversation, with real shared memory."""

    def __init__(
        self, name: str, socket_path: Path, identities: Path, limits: ClientLimits = LIMITS
    ) -> None:
        self.identities = identities
        self.descriptor = os.memfd_create(name)
        os.truncate(self.descriptor, ROW_BYTES * NUM_ROWS)
        self.memory = mmap.mmap(self.descriptor, ROW_BYTES * NUM_ROWS)
        self.memory[:] = bytes([PADDING]) * len(self.memory)
        self.found: dict[int, bytes] = {}
        self.over: list[bytes] = []
        """Transfers whose end it was told."""
        self.done: dict[int, JobDone] = {}
        self._next_job = 1_000_000
        self.requests = BlockRequests(self.send, time.monotonic_ns)
        self.client = PoolConnection(
            socket_path,
            hello(name),
            self.descriptor,
            self._on_message,
            self.requests.on_lost,
            limits,
        )

    def send(self, message: Message) -> bool:
        return self.client.send(message)

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, LookupDone):
            self.found[message.job] = message.found
        elif isinstance(message, TransferOver):
            self.over.append(message.transfer_id)
        self.requests.on_message(message)

    async def connected(self) -> None:
        await until(lambda: self.client.is_connected)

    def fill(self, keys: list[BlockKey]) -> list[int]:
        """Compute blocks into rows."""
        for row, key in enumerate(keys):
            data, at = content(key), row * ROW_BYTES
            self.memory[at : at + ROW_BYTES] = bytes([PADDING]) * ROW_BYTES
            for offset, length in EXTENTS[key.group]:
                self.memory[at + offset : at + offset + length] = data[:length]
                data = data[length:]
        return list(range(len(keys)))

    def row(self, row: int, group: int) -> bytes:
        at = row * ROW_BYTES
        return b"".join(self.memory[at + o : at + o + n] for o, n in EXTENTS[group])

    def padding(self, row: int, group: int) -> set[int]:
        """Every byte of a row that is no block's."""
        data = {o + i for o, n in EXTENTS[group] for i in range(n)}
        return {self.memory[row * ROW_BYTES + i] for i in range(ROW_BYTES) if i not in data}

    async def finish(self, job: Store | Load) -> JobDone:
        self.requests.submit(job)
        while job.job not in self.done:
            self.done |= {done.job: done for done in self.requests.take_done()}
            await asyncio.sleep(0.001)
        return self.done[job.job]

    async def store(
        self, keys: list[BlockKey], transfer: bytes | None = None, tenant: str = ""
    ) -> bool:
        message = Store(
            job=self.job(),
            keys=wire_keys(keys),
            rows=self.fill(keys),
            transfer_id=transfer,
            pushed=[transfer is not None] * len(keys),
            tenant=tenant,
        )
        return (await self.finish(message)).ok

    async def load(self, keys: list[BlockKey]) -> list[bool]:
        self.memory[:] = bytes([PADDING]) * len(self.memory)
        rows = list(range(len(keys)))
        done = await self.finish(Load(job=self.job(), keys=wire_keys(keys), rows=rows))
        return done.loaded

    async def look_up(
        self, keys: list[BlockKey], transfer: bytes | None = None, source: str = "prfaas-pool"
    ) -> list[int]:
        job = self.job()
        lookup = Lookup(job=job, keys=wire_keys(keys), transfer_id=transfer, source=source)
        assert self.send(lookup)
        await until(lambda: job in self.found)
        return list(self.found[job])

    def push(self, peer: str = "pd-pool", **ticket: object) -> bytes:
        transfer = secrets.token_bytes(16)
        sealed = seal(self.identities, transfer, **({"destination": peer} | ticket))  # type: ignore[arg-type]
        assert self.send(Push(transfer_id=transfer, peer=peer, ticket=sealed, blocks=NAMED))
        return transfer

    def push_done(self, transfer: bytes, rest: Iterable[BlockKey] = ()) -> None:
        assert self.send(PushDone(transfer_id=transfer, rest=wire_keys(rest)))

    def job(self) -> int:
        self._next_job += 1
        return self._next_job

    def close(self) -> None:
        self.client.close()
        self.memory.close()
        os.close(self.descriptor)


def hello(name: str) -> EngineHello:
    return EngineHello(
        engine=name,
        layout=layout_spec(LAYOUT),
        row_bytes=ROW_BYTES,
        num_rows=NUM_ROWS,
        extents={group: list(extents) for group, extents in EXTENTS.items()},
        facts=FACTS,
        model="org/name@0123",
    )


def seal(identities: Path, transfer: bytes, signer: str = "gateway", **changes: object) -> bytes:
    """A ticket for a transfer from the PrfaaS site to the PD site, or for something else."""
    fields: dict[str, Any] = {
        "transfer_id": transfer,
        "tenant": "a-tenant",
        "layout_id": LAYOUT.layout_id,
        "source": "prfaas-pool",
        "destination": "pd-pool",
        "blocks": manifest_digest(NAMED),
        "bytes_max": BUDGET,
        "expires_at_ns": time.time_ns() + 60 * 10**9,
    }
    ticket = Ticket(**(fields | changes))
    return TicketSigner(identity_in(identities, signer)).seal(ticket)


def offer(identities: Path, transfer: bytes, **changes: object) -> Offer:
    """First message of a well-behaved source."""
    sealed = seal(identities, transfer, **changes)  # type: ignore[arg-type]
    return Offer(transfer_id=transfer, ticket=sealed, blocks=NAMED)


@dataclass
class Peer:
    """Somebody with a certificate at a pool node's link port."""

    channel: Channel
    messages: list[AnyMessage]
    closed: list[str]
    pinging: asyncio.Task[None]
    """Or the node would take a test that lasts for five seconds for a dead peer."""
    data: asyncio.StreamWriter | None = None
    """Its data connection, if it is a source."""

    def bring(self, block: ReceivedBlock) -> None:
        """Send a block in one fragment."""
        name = block.layout_id, block.key
        whole = OutgoingBlock(block.transfer_id, name, block.digest, block.data)
        fragment = Fragment(whole, 0, len(block.data))
        assert self.data is not None
        self.data.write(encode_prefix(fragment) + fragment.data)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]


async def dial(site: Site, identities: Path, name: str) -> Peer:
    return await dial_port(site.port, identities, name)


async def dial_port(port: int, identities: Path, name: str) -> Peer:
    messages: list[AnyMessage] = []
    closed: list[str] = []

    def left(_: Channel, reason: str) -> None:
        closed.append(reason)
        if peer.data is not None:
            peer.data.transport.abort()

    _, channel = await asyncio.get_running_loop().create_connection(
        lambda: Channel(lambda _, frame: messages.append(decode(frame.payload)), left),
        LOOPBACK,
        port,
        ssl=identity_in(identities, name).client_context(),
    )
    peer = Peer(channel, messages, closed, asyncio.create_task(keep_alive(channel)))
    return peer


async def subscribe(
    site: Site, identities: Path, shares: dict[str, tuple[float, float]] | None = None
) -> Peer:
    gateway = await dial(site, identities, "gateway")
    gateway.channel.send(Subscribe(gateway="gateway", shares=shares or {}))
    return gateway


async def source(site: Site, identities: Path) -> Peer:
    """A sender that has our source pool's certificate, to misbehave with."""
    peer = await dial(site, identities, "prfaas-pool")
    link = secrets.token_hex(8)
    peer.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link=link))
    await until(lambda: bool(peer.of(Resumed)))
    tls = identity_in(identities, "prfaas-pool").dialling().data
    _, peer.data = await asyncio.open_connection(LOOPBACK, site.port, ssl=tls)
    peer.data.write(encode(Join(pool="prfaas-pool", link=link, number=1)))
    return peer


@dataclass
class Relay:
    """A wire between two pools that can be cut, and plugged in again."""

    target: int = 0
    port: int = 0
    is_plugged: bool = True
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: bytes pile up in the sockets, as behind a slow link."""
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def open(self) -> None:
        self.flows.set()
        self._server = await asyncio.start_server(self._carry, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self.is_plugged = False
        self.flows.set()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        await until(lambda: not self._tasks)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if not self.is_plugged:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(far_writer)
        for ends in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(*ends))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.flows.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
