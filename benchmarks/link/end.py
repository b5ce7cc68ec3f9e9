"""One end of the measured link: a process in a namespace of the WAN lab.

`receive` runs a pool node's link port and store; `send` runs an outbound link. `send` takes JSON
lines on standard input, each a transfer or a question, and answers each with one JSON line.

BENCH_ENCRYPTION is the `link_encryption` of both ends, sealed without it. BENCH_CODEC is their
`link_codec`, raw without it. BENCH_CONTENT says what blocks hold: "noise", or "bfloat16": normal
numbers, attention alone, or "paper": prompts of a model with the cache of the paper's case study.
BENCH_QUALITY is the quality class of all transfers. BENCH_FRAGMENT_ROUND_TRIPS is the part of a
round trip that a fragment lasts at least.
"""

import asyncio
import itertools
import json
import os
import resource
import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, KvPage, Layout, Plane
from prfaas.core.kv.shipping import NamedBlocks, manifest_digest, manifest_of_keys
from prfaas.core.transfer.facts import TransferDone
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.core.transfer.tickets import Ticket
from prfaas.core.transfer.transfer_state import Transfer
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.codec.loading import KERNELS
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.net.link_probe import ProbeSink
from prfaas.pool.receive.data_port import DataPort
from prfaas.pool.receive.decoding import Decoding
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.receive.link_server import LinkPort
from prfaas.pool.send import fragment_sizes
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.pool.tickets.ticket_checks import Grant, TicketChecks
from prfaas.wire import sockets
from prfaas.wire.allow_list import AllowList
from prfaas.wire.channel import Channel
from prfaas.wire.fragments import block_digest
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.codec import OfGateway
from prfaas.wire.messages.link import Pull
from prfaas.wire.tickets import TicketOpener, TicketSigner

PORT = 7100
LAYOUT = b"L" * 32
MIB = 1 << 20
KV_BLOCK, STATE_BLOCK = 2 * MIB, MIB
ENCRYPTION = LinkEncryption(os.environ.get("BENCH_ENCRYPTION", "sealed"))
LIFETIME_NS, GRACE_NS = 120 * 10**9, 3 * 10**9
BUDGET_BYTES = 1 << 29
SIZES = [KV_BLOCK, KV_BLOCK, KV_BLOCK, STATE_BLOCK]
if os.environ.get("BENCH_CONTENT") == "bfloat16":
    SIZES = [KV_BLOCK]
MODEL = Layout(
    LAYOUT,
    16,
    "0",
    (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, KV_BLOCK, planes=(Plane("bfloat16", KV_BLOCK),)),),
)
PAGE = KvPage(17, 64, 2, 128, 128, is_token_major=False)
"""64 tokens of 17,408 bytes; the paper's model has 17,280."""
PAPER_STATE_BLOCK, PAPER_STATE_BLOCKS = 2 * MIB, 87
"""Recurrent state of 174 MiB, as several groups have it."""
PAPER = Layout(
    LAYOUT,
    PAGE.tokens,
    "0",
    (
        CacheGroup(
            0,
            GroupKind.FULL_ATTENTION,
            PAGE.tokens,
            PAGE.num_bytes,
            planes=(Plane("bfloat16", PAGE.num_bytes),),
            pages=(PAGE,),
        ),
        CacheGroup(
            1,
            GroupKind.LINEAR_STATE,
            PAGE.tokens,
            PAPER_STATE_BLOCK,
            planes=(Plane("float32", PAPER_STATE_BLOCK),),
        ),
    ),
)
QUALITY = Quality(os.environ.get("BENCH_QUALITY", "lossless"))
IS_PAPER = os.environ.get("BENCH_CONTENT") == "paper"


def numbers(seed: int, num_bytes: int = KV_BLOCK) -> bytes:
    """A block of normal numbers in bfloat16."""
    values = np.random.default_rng(seed).standard_normal(num_bytes // 2, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Unheard:
    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None: ...

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None: ...


class NoGateway:
    def ordered(self, channel: Channel, message: OfGateway) -> None: ...

    def gateway_left(self, channel: Channel) -> None: ...

    def shows_load(self, peer: str) -> bool:
        return True

    def serve(self, link: OutboundLink, pull: Pull) -> None: ...


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def fill(store: BlockStore) -> None:
    """Give a store's memory its pages: a node that was full once takes none from the kernel."""
    held: list[memoryview] = []
    for size in itertools.cycle(SIZES):
        buffer = store.room.arena.allocate(size)
        if buffer is None:
            return
        buffer[:] = bytes(size)
        held.append(buffer)


async def receive(identities: Path, host: str) -> None:
    metrics = PoolMetrics()
    store = BlockStore(1 << 30, Unheard())
    fill(store)
    identity = identity_in(identities, "pd-pool")
    codec = LinkCodec(os.environ.get("BENCH_CODEC", "raw"))
    opener = TicketOpener(identity.authority, frozenset({"gateway"}))
    facts, io = FactStream(), IoThread(int(os.environ.get("BENCH_LANES", "1")))
    end = LinkEnd("pd-pool", "bench", io, metrics, ENCRYPTION, GRACE_NS)
    checks = TicketChecks("pd-pool", opener, metrics, facts)
    inbound = InboundTransfers(end, store, facts, checks, {})
    # As a gateway does: without it, committed blocks keep their room for the ticket's time.
    facts.subscribe(TransferDone, lambda fact: inbound.release(fact.transfer.transfer_id))
    decoding, tls = Decoding(codec, KnownLayouts(), metrics), identity.accepting()
    sources = frozenset({"prfaas-pool"})
    port = LinkPort(
        (host, PORT),
        tls,
        DataPort(end, tls.data, sources, inbound, decoding),
        ProbeSink(tls.probe, sources, io, metrics.link_refused),
        frozenset(),
        NoGateway(),
    )
    await port.open()
    if codec is not LinkCodec.RAW:
        loop = asyncio.get_running_loop()

        def ready() -> None:
            loop.call_soon_threadsafe(decoding.kernels_ready)

        KERNELS.load(ready)
    say("ready")
    commands = await lines()
    while await commands.readline():
        codec_s = metrics.registry.get_sample_value(
            "prfaas_codec_seconds_total", {"direction": "received"}
        )
        say(
            {
                "codec_s": codec_s,
                "cpu_s": cpu_s(),
                "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    await port.close()


class Sender:
    def __init__(self, identities: Path, host: str, budget: int) -> None:
        identity = identity_in(identities, "prfaas-pool")
        is_numbers = os.environ.get("BENCH_CONTENT") == "bfloat16"
        layouts, metrics = KnownLayouts(), PoolMetrics()
        if is_numbers or IS_PAPER:
            layouts.learn(PAPER if IS_PAPER else MODEL)
            KERNELS.load()
        opener = TicketOpener(identity.authority, frozenset({"gateway"}))
        self.signer = TicketSigner(identity_in(identities, "gateway"))
        facts, io = FactStream(), IoThread(int(os.environ.get("BENCH_LANES", "1")))
        facts.subscribe(TransferDone, lambda fact: self.ended(fact.transfer))
        codec = LinkCodec(os.environ.get("BENCH_CODEC", "raw"))
        self.link = OutboundLink(
            LinkEnd("prfaas-pool", "bench", io, metrics, ENCRYPTION, GRACE_NS),
            Destination(
                "pd-pool",
                (host, PORT),
                budget,
                int(os.environ.get("BENCH_CONNECTIONS", "0")),
                AllowList({"pd-pool"}),
            ),
            identity.dialling(),
            LinkCoding(codec, layouts, "pd-pool", metrics),
            TicketChecks("prfaas-pool", opener, metrics, facts),
            NoGateway(),
            facts,
        )
        self.metrics = metrics
        self.waiting: dict[bytes, asyncio.Future[Transfer]] = {}
        self.state = os.urandom(STATE_BLOCK)
        # Enough of them that none is in a core's cache.
        content = [numbers(seed) for seed in range(32)] if is_numbers else [os.urandom(KV_BLOCK)]
        self.contents = itertools.cycle(content)
        self.made: list[bytes] = []

    def ended(self, transfer: Transfer) -> None:
        self.waiting.pop(transfer.transfer_id).set_result(transfer)

    def block(self, num_bytes: int) -> tuple[BlockKey, StoredBlock]:
        is_state = num_bytes == STATE_BLOCK
        key = BlockKey(int(is_state), secrets.token_bytes(32))
        data = memoryview(self.state if is_state else next(self.contents))[:num_bytes]
        return key, StoredBlock(data, block_digest(LAYOUT, key, data))

    def begin(self, keys: Iterable[BlockKey]) -> bytes:
        transfer_id = secrets.token_bytes(16)
        expires_at_ns = time.time_ns() + LIFETIME_NS
        ends = "prfaas-pool", "pd-pool"
        named = NamedBlocks(manifest_of_keys(keys))
        digest = manifest_digest(named.manifest)
        ticket = Ticket(
            transfer_id,
            "bench",
            LAYOUT,
            *ends,
            digest,
            BUDGET_BYTES,
            expires_at_ns,
            quality=QUALITY,
        )
        self.waiting[transfer_id] = asyncio.get_running_loop().create_future()
        self.link.open(Grant(ticket, self.signer.seal(ticket), named, LIFETIME_NS))
        return transfer_id

    def prompt(self, num_tokens: int) -> list[tuple[BlockKey, StoredBlock]]:
        """Blocks of a prompt of the paper's model: attention, then its state."""
        if not self.made:
            self.made = [numbers(seed, PAGE.num_bytes) for seed in range(32)]
            draw = np.random.default_rng(1).standard_normal
            self.state = draw(PAPER_STATE_BLOCK // 4, np.float32).tobytes()
        contents = [
            (0, self.made[number % len(self.made)]) for number in range(num_tokens // PAGE.tokens)
        ]
        contents += [(1, self.state)] * PAPER_STATE_BLOCKS
        found = []
        for group, data in contents:
            key = BlockKey(group, secrets.token_bytes(32))
            found.append((key, StoredBlock(memoryview(data), block_digest(LAYOUT, key, data))))
        return found

    async def transfer(self, num_bytes: int) -> dict[str, Any]:
        """Push blocks, three of attention to one of state, all at once."""
        sizes = itertools.cycle(SIZES)
        blocks, left = [], num_bytes
        while left > 0:
            blocks.append(self.block(min(left, next(sizes))))
            left -= len(blocks[-1][1].data)
        return await self.send(blocks)

    async def send(self, blocks: list[tuple[BlockKey, StoredBlock]]) -> dict[str, Any]:
        """Push blocks of a transfer all at once; return how long its parts took."""
        transfer_id = self.begin(key for key, _ in blocks)
        done = self.waiting[transfer_id]
        began = time.monotonic()
        for key, block in blocks:
            self.link.push(transfer_id, LAYOUT, key, block)
        self.link.finish(transfer_id)
        outgoing = self.link.machine.open[transfer_id]
        while not done.done() and len(outgoing.blocks) == len(blocks):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first = time.monotonic() - began
        ended = await done
        took = time.monotonic() - began
        return {
            "s": took,
            "first_s": first,
            "state": ended.state,
            "bytes": ended.num_bytes,
            "cpu_s": cpu_s(),
        }

    def codec(self) -> dict[str, object]:
        """Counts of coding so far."""
        value = self.metrics.registry.get_sample_value
        labels = {"peer": "pd-pool", "direction": "sent"}
        switch = self.link.coding._switch
        return {
            "block_bytes": value("prfaas_link_bytes_total", labels),
            "wire_bytes": value("prfaas_link_wire_bytes_total", labels),
            "codec_s": value("prfaas_codec_seconds_total", {"direction": "sent"}),
            "is_coding": switch is not None and switch.is_on,
            "gain": 1.0 if switch is None else switch.gain,
            "network_share": self.link.control._meter.network_share,
        }

    async def overlap(self, num_chunks: int, chunk_bytes: int, every_s: float) -> dict[str, Any]:
        """Chunks at a steady pace; how long after the last one the receiver has everything."""
        chunks = [[self.block(KV_BLOCK)] * 1 for _ in range(num_chunks)]
        for chunk in chunks:
            chunk += [self.block(KV_BLOCK) for _ in range(chunk_bytes // KV_BLOCK - 1)]
        transfer_id = self.begin(key for chunk in chunks for key, _ in chunk)
        done = self.waiting[transfer_id]
        for index, chunk in enumerate(chunks):
            for key, block in chunk:
                self.link.push(transfer_id, LAYOUT, key, block)
            last = time.monotonic()
            if index < num_chunks - 1:
                await asyncio.sleep(every_s)
        self.link.finish(transfer_id)
        ended = await done
        return {"s": time.monotonic() - last, "state": ended.state}


async def send(identities: Path, host: str, budget: int) -> None:
    sender = Sender(identities, host, budget)
    running = asyncio.create_task(sender.link.run())
    commands = await lines()
    while not sender.link.is_up or sender.link.telemetry.num_connections < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    coding = sender.link.coding
    while coding.offered and not coding._is_agreed:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    while QUALITY.is_lossy and not coding._may_round:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    say("ready")
    bulk: set[asyncio.Task[Any]] = set()
    while line := await commands.readline():
        command = json.loads(line)
        match command:
            case {"transfer": num_bytes}:
                say(await sender.transfer(num_bytes))
            case {"prompt": num_tokens}:
                say(await sender.send(sender.prompt(num_tokens)))
            case {"bulk": num_bytes}:
                bulk.add(asyncio.create_task(sender.transfer(num_bytes)))
                say({})
            case {"bulk_done": _}:
                say([await task for task in bulk])
                bulk.clear()
            case {"overlap": [num_chunks, chunk_bytes, every_s]}:
                say(await sender.overlap(num_chunks, chunk_bytes, every_s))
            case {"telemetry": _}:
                telemetry = sender.link.telemetry
                values = {name: getattr(telemetry, name) for name in telemetry.__struct_fields__}
                say(values | sender.codec() | {"cpu_s": cpu_s()})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    if control := os.environ.get("BENCH_CONGESTION_CONTROL"):
        sockets.CONGESTION_CONTROL = control.encode()
    if part := os.environ.get("BENCH_FRAGMENT_ROUND_TRIPS"):
        fragment_sizes.FRAGMENT_ROUND_TRIPS = float(part)
    role, directory, address, *rest = sys.argv[1:]
    if role == "receive":
        asyncio.run(receive(Path(directory), address))
    else:
        asyncio.run(send(Path(directory), address, int(rest[0])))
