"""Bytes from people who should not be here, and from engines and pools that lie."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.net import listener
from prfaas.pool.receive import data_port
from prfaas.wire.fragments import ReceivedBlock, block_digest
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.engine import EngineHello, Load, Push, Store
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import Subscribe
from prfaas.wire.messages.link import Abort, Accepted, Commit, Offer, PoolHello, Release, Resumed
from tests.orders import purge, purge_end
from tests.pool.conftest import World
from tests.pool.sites import (
    LAYOUT,
    LOOPBACK,
    NUM_ROWS,
    PROMPT,
    ROW_BYTES,
    Engine,
    Peer,
    Site,
    content,
    dial,
    hello,
    offer,
    source,
    until,
)

KEY = PROMPT[0]
TRANSFER = bytes(range(16))


def a_block(key: BlockKey = KEY, data: bytes | None = None) -> ReceivedBlock:
    good = content(key)
    digest = block_digest(LAYOUT.layout_id, key, good)
    return ReceivedBlock(TRANSFER, LAYOUT.layout_id, key, digest, bytearray(data or good))


async def still_serves(pd: Site, world: World) -> None:
    """A well-behaved source can still bring a block."""
    peer = await source(pd, world.identities)
    peer.channel.send(offer(world.identities, TRANSFER))
    peer.bring(a_block())
    peer.channel.send(Commit(transfer_id=TRANSFER, num_blocks=1))
    await until(lambda: KEY in pd.held())
    peer.channel.close("done")


# --- the link port ---


async def test_garbage_instead_of_tls_is_counted_and_the_node_serves_on(world: World) -> None:
    pd = await world.start_pd()
    reader, writer = await asyncio.open_connection(LOOPBACK, pd.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n")
    await reader.read()
    writer.transport.abort()
    await until(lambda: pd.metric("connections_refused_total", port="link") == 1)
    await still_serves(pd, world)


async def test_a_certificate_of_a_foreign_authority_is_counted_and_refused(
    world: World, tmp_path: Path
) -> None:
    pd = await world.start_pd()
    make_authority(tmp_path / "foreign")
    stranger = make_identity(tmp_path / "foreign", "prfaas-pool")
    context = stranger.client_context()
    context.load_verify_locations(world.identities / "ca.pem")
    reader, writer = await asyncio.open_connection(LOOPBACK, pd.port, ssl=context)
    with contextlib.suppress(OSError):
        assert await reader.read() == b""
    writer.transport.abort()
    await until(lambda: pd.metric("connections_refused_total", port="link") == 1)
    assert not pd.node.inbound.channels.is_connected("prfaas-pool")
    await still_serves(pd, world)


async def test_a_silent_caller_does_not_keep_others_out(world: World) -> None:
    pd = await world.start_pd()
    silent = [socket.create_connection((LOOPBACK, pd.port)) for _ in range(20)]
    await still_serves(pd, world)
    for connection in silent:
        connection.close()


async def dialled(port: int) -> socket.socket:
    return await asyncio.to_thread(socket.create_connection, (LOOPBACK, port))


@pytest.mark.parametrize(
    "kind", ["says nothing", "begins a data connection", "begins one without TLS"]
)
async def test_no_number_of_silent_callers_keeps_a_peer_out(world: World, kind: str) -> None:
    """Each is let go after five seconds; until then a new one takes the place of the oldest."""
    pd = await world.start_pd()
    count = max(listener.CALLERS_MAX, data_port.DATA_CALLERS_MAX) + 10
    silent = [await dialled(pd.port) for _ in range(count)]
    if kind == "begins one without TLS":
        for connection in silent:
            connection.sendall(b"PFKS" + bytes(10))
    if kind == "begins a data connection":
        context = identity_in(world.identities, "stranger").dialling().data
        for connection in silent:
            into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
            with contextlib.suppress(ssl.SSLWantReadError):
                context.wrap_bio(into, out).do_handshake()
            connection.sendall(out.read())
    await until(lambda: pd.metric("connections_refused_total", port="link") >= 10)
    await still_serves(pd, world)
    await until(lambda: len(pd.node.link_port.data._receivers) <= data_port.DATA_CALLERS_MAX)
    for connection in silent:
        connection.close()


async def test_a_name_that_is_not_on_the_list_is_counted_and_refused(world: World) -> None:
    pd = await world.start_pd()
    stranger = await dial(pd, world.identities, "stranger")
    stranger.channel.send(Offer(transfer_id=TRANSFER))
    await until(lambda: bool(stranger.closed))
    await until(lambda: pd.metric("connections_refused_total", port="link") == 1)
    assert pd.node.inbound.known.num_open == 0
    await still_serves(pd, world)


ROLES: list[tuple[str, Message]] = [
    ("gateway", PoolHello(pool="prfaas-pool", epoch="e", link="l")),
    ("gateway", Offer(transfer_id=TRANSFER)),
    ("gateway", Commit(transfer_id=TRANSFER, num_blocks=0)),
    ("prfaas-pool", Subscribe(gateway="gateway")),
    ("prfaas-pool", Release(transfer_id=TRANSFER)),
    ("prfaas-pool", purge(job=1, source="pd-pool")),
    ("prfaas-pool", purge_end(job=9, source="prfaas-pool")),
    ("prfaas-pool", PoolHello(pool="gateway", epoch="e", link="l")),
    ("prfaas-pool", Push(transfer_id=TRANSFER, peer="pd-pool")),
    ("gateway", Load(job=1, keys=[], rows=[])),
]


@pytest.mark.parametrize(("name", "message"), ROLES, ids=lambda v: v.__class__.__name__)
async def test_what_is_not_for_somebody_to_say_ends_the_connection(
    world: World, name: str, message: Message
) -> None:
    pd = await world.start_pd()
    peer = await dial(pd, world.identities, name)
    peer.channel.send(message)
    await until(lambda: bool(peer.closed))
    assert pd.metric("connections_refused_total", port="link") == 1
    await still_serves(pd, world)


@pytest.mark.parametrize(
    "garbage", [b"\0" * 64, encode(Offer(transfer_id=TRANSFER))[:-1] + b"!" * 60]
)
async def test_garbage_inside_tls_ends_the_connection(world: World, garbage: bytes) -> None:
    pd = await world.start_pd()
    context = identity_in(world.identities, "prfaas-pool").client_context()
    reader, writer = await asyncio.open_connection(LOOPBACK, pd.port, ssl=context)
    writer.write(garbage)
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.transport.abort()
    await until(lambda: not pd.node.inbound.channels.is_connected("prfaas-pool"))
    assert pd.metric("connections_refused_total", port="link") == 1
    await still_serves(pd, world)


async def offering(pd: Site, world: World) -> Peer:
    peer = await source(pd, world.identities)
    peer.channel.send(offer(world.identities, TRANSFER))
    await until(lambda: bool(peer.of(Accepted)))
    return peer


@pytest.mark.parametrize("damage", ["flipped", "renamed", "cut"])
async def test_a_damaged_block_closes_the_link_and_is_not_stored(world: World, damage: str) -> None:
    pd = await world.start_pd()
    peer = await offering(pd, world)
    peer.bring(a_block(PROMPT[1]))
    good = content(KEY)
    block = {
        "flipped": a_block(data=bytes([good[0] ^ 1]) + good[1:]),
        "renamed": ReceivedBlock(
            TRANSFER, LAYOUT.layout_id, PROMPT[2], a_block().digest, bytearray(good)
        ),
        "cut": a_block(data=good[:-1]),
    }[damage]
    peer.bring(block)
    await until(lambda: bool(peer.closed))
    assert pd.held() == {PROMPT[1]}
    assert pd.metric("pool_blocks_dropped_total", reason="digest") == 1
    assert pd.metric("transfers_total", direction="received", state="aborted") == 1


async def test_a_transfer_that_is_resumed_many_times_over_is_answered_once(world: World) -> None:
    pd = await world.start_pd()
    pd.node.inbound.aborted(TRANSFER, "client left")
    peer = await dial(pd, world.identities, "prfaas-pool")
    peer.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link="l", resumes=[TRANSFER] * 1000))
    await until(lambda: bool(peer.of(Resumed)))
    assert len(peer.of(Abort)) == 1
    peer.channel.close("done")


# --- the engines' socket ---


async def shout(path: Path, data: bytes, descriptors: list[int]) -> bytes:
    """Say something on the engines' socket and listen until the node hangs up."""

    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(20)
            caller.connect(str(path))
            if descriptors:
                socket.send_fds(caller, [data], descriptors)
            elif data:
                caller.sendall(data)
            if not data:
                caller.shutdown(socket.SHUT_WR)
            try:
                return caller.recv(1 << 16)
            except ConnectionError:
                return b""

    return await asyncio.to_thread(talk)


def lying(**changes: object) -> EngineHello:
    return msgspec.structs.replace(hello("liar"), **changes)


def with_groups(*groups: tuple[int, int]) -> EngineHello:
    """A hello whose layout has other block sizes."""
    spec = hello("liar").layout
    changed = [
        msgspec.structs.replace(spec.groups[0], index=index, block_bytes=size)
        for index, size in groups
    ]
    return lying(layout=msgspec.structs.replace(spec, groups=changed))


LIES = {
    "more rows than the file has": lying(num_rows=NUM_ROWS + 1),
    "longer rows than the file has": lying(row_bytes=ROW_BYTES * 2),
    "an extent beyond the row": lying(extents={0: [(ROW_BYTES - 100, 128)], 1: [(120, 64)]}),
    "extents that are not the block": lying(extents={0: [(0, 127)], 1: [(120, 64)]}),
    "a group without extents": lying(extents={0: [(0, 128)]}),
    "extents of a group that is not in the layout": lying(
        extents={0: [(0, 128)], 1: [(120, 64)], 7: [(0, 2**50)]}
    ),
    "a group here and elsewhere": lying(elsewhere=[1]),
    "a group elsewhere that is not in the layout": lying(elsewhere=[7]),
    "rows that reach beyond the file": lying(row_span=ROW_BYTES + 1),
    "a span that does not reach its parts": lying(row_span=100),
    "a block larger than its row": with_groups((0, ROW_BYTES + 1)),
    "a group named twice": with_groups((0, 128), (0, 128)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_engine_that_lies_about_its_memory_is_refused(world: World, lie: str) -> None:
    pd = await world.start_pd()
    descriptor = os.memfd_create("liar")
    os.truncate(descriptor, ROW_BYTES * NUM_ROWS)
    path = world.sockets / "pd-pool.sock"
    assert await shout(path, encode(LIES[lie]), [descriptor]) == b""
    os.close(descriptor)
    engine = await world.engine("pd-pool")
    assert await engine.store([KEY])
    assert pd.held() == {KEY}


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("data", "num_passed"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 0),
        (b"GET / HTTP/1.1\r\n\r\n", 1),
        (encode(hello("e")), 0),
        (encode(Push(transfer_id=TRANSFER, peer="p")), 1),
        (encode(hello("e")) * 2, 1),
        (encode(lying(num_rows=NUM_ROWS + 1)), 1),
        (encode(Push(transfer_id=TRANSFER, peer="p"))[:12] + b"\xc1" * 200, 1),
        (b"", 0),
    ],
)
async def test_garbage_on_the_engines_socket_is_refused_and_leaves_nothing_open(
    world: World, data: bytes, num_passed: int
) -> None:
    await world.start_pd()
    path = world.sockets / "pd-pool.sock"
    descriptor = os.memfd_create("garbage")
    os.truncate(descriptor, ROW_BYTES * NUM_ROWS)
    await shout(path, b"warm" * 10, [])
    before = num_descriptors()
    for _ in range(3):
        assert await shout(path, data, [descriptor] * num_passed) == b""
    await until(lambda: num_descriptors() <= before)
    os.close(descriptor)
    engine = await world.engine("pd-pool")
    assert await engine.store([KEY])


async def test_an_engine_that_says_nothing_is_let_go(world: World) -> None:
    await world.start_pd(hello_timeout_s=0.05)
    assert await shout(world.sockets / "pd-pool.sock", encode(hello("e"))[:10], []) == b""


BROKEN: dict[str, Callable[[Engine], Message]] = {
    "a row beyond its memory": lambda e: Store(
        job=1, keys=wire_keys([KEY]), rows=[NUM_ROWS], pushed=[False]
    ),
    "a group it did not announce": lambda e: Store(job=1, keys=[(9, b"h" * 32)], rows=[0]),
    "fewer rows than keys": lambda e: Store(job=1, keys=wire_keys(PROMPT[:2]), rows=[0]),
    "fewer flags than keys": lambda e: Store(
        job=1, keys=wire_keys(PROMPT[:2]), rows=[0, 1], pushed=[False]
    ),
    "fewer rows than keys to load": lambda e: Load(job=1, keys=wire_keys(PROMPT[:2]), rows=[0]),
    "what only a pool says": lambda e: Offer(transfer_id=TRANSFER),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_an_engine_that_breaks_the_protocol_is_left_alone(world: World, kind: str) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    assert engine.send(BROKEN[kind](engine))
    await until(lambda: not engine.client.is_connected)
    await engine.connected()
    assert await engine.store([PROMPT[5]])
    assert PROMPT[5] in pd.held()


async def test_a_block_of_another_size_under_the_same_name_is_not_loaded(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    assert pd.node.store.put(LAYOUT.layout_id, KEY, bytearray(7), b"d" * 32)
    assert await engine.load([KEY, PROMPT[1]]) == [False, False]


async def test_only_the_owner_may_reach_the_engines_socket(world: World) -> None:
    await world.start_pd()
    assert (world.sockets / "pd-pool.sock").stat().st_mode & 0o777 == 0o600
