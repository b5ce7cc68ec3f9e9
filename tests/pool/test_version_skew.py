"""A pool node beside peers of the version before: it refuses in words that they understand."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from prfaas.engines.pool_client import PoolConnection
from prfaas.wire.frames import MAGIC, VERSION, VersionError, encode_control
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.base import Goodbye, Message, Ping, Unsupported
from prfaas.wire.messages.codec import decode, encode
from prfaas.wire.messages.gateway import SnapshotEnd, Subscribe
from prfaas.wire.messages.link import PoolHello

from .conftest import World
from .sites import LOOPBACK, PROMPT, dial, hello, until

OLD = VERSION - 1
WHY = str(VersionError(OLD))
HEAD = struct.Struct(">4sBBHI")


def last_word(data: bytes) -> Goodbye:
    """The Goodbye in frames of the old version."""
    magic, version, _, _, length = HEAD.unpack_from(data)
    assert (magic, version) == (MAGIC, OLD)
    message = decode(data[HEAD.size : HEAD.size + length])
    assert isinstance(message, Goodbye)
    return message


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("gateway", Subscribe(gateway="gateway")),
        ("prfaas-pool", PoolHello(pool="prfaas-pool", epoch="e", link="0" * 16)),
    ],
)
async def test_an_old_gateway_and_an_old_pool_node_are_told(
    world: World, who: str, said: Message
) -> None:
    pd = await world.start_pd()
    tls = identity_in(world.identities, who).client_context()
    reader, writer = await asyncio.open_connection(LOOPBACK, pd.port, ssl=tls)
    writer.write(encode(said, OLD))
    assert last_word(await reader.read()).reason == WHY
    writer.close()
    decode_engine = await world.engine("pd-pool")
    assert await decode_engine.store(PROMPT)


async def test_an_old_engine_is_told(world: World) -> None:
    pd = await world.start_pd()

    def talk() -> bytes:
        descriptor = os.memfd_create("old")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(pd.node.settings.socket_path))
            socket.send_fds(connection, [encode(hello("old"), OLD)], [descriptor])
            os.close(descriptor)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    assert last_word(await asyncio.to_thread(talk)).reason == WHY
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)


def newer(job: int = 5) -> bytes:
    """A frame with a message of a kind that does not exist yet."""
    return encode_control(msgspec.msgpack.encode({"t": "from_the_future", "job": job, "x": [1]}))


@pytest.mark.parametrize("who", ["gateway", "prfaas-pool"])
async def test_a_newer_peer_is_answered_and_keeps_its_connection(world: World, who: str) -> None:
    pd = await world.start_pd()
    peer = await dial(pd, world.identities, who)
    transport = peer.channel._transport
    assert transport is not None
    for _ in range(3):
        transport.write(newer())
    await until(lambda: len(peer.of(Unsupported)) == 3)
    assert peer.of(Unsupported)[0] == Unsupported(kind="from_the_future", job=5)
    if who == "gateway":
        peer.channel.send(Subscribe(gateway="gateway"))
        await until(lambda: peer.of(SnapshotEnd))
        [end] = peer.of(SnapshotEnd)
        assert isinstance(end, SnapshotEnd)
        assert {"order", "pull"} <= set(end.takes)
    assert not peer.closed
    peer.channel.close("done")


async def test_a_newer_receiver_and_a_newer_pool_node_keep_their_peers(world: World) -> None:
    _, pd, prefill, _ = await world.two_sites()
    link = pd.node.inbound.channels.of("prfaas-pool")
    session = pd.node.engine_room.engines["engine-of-pd-pool"]
    for channel in (link, session.channel):
        assert channel is not None
        assert channel._transport is not None
        channel._transport.write(newer())
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed") == 1)
    assert link is not None
    assert link.is_open
    assert pd.node.engine_room.engines["engine-of-pd-pool"] is session


@pytest.mark.parametrize("answer", [encode(Goodbye(reason="go away")), encode(Ping(), OLD)])
async def test_an_engine_names_the_pool_node_that_it_can_not_use_and_why_once(
    answer: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    calls = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    path = tmp_path / "pool.sock"
    server = await asyncio.start_unix_server(refuse, path)
    descriptor = os.memfd_create("engine")
    ignore: Callable[[object], None] = lambda _: None  # noqa: E731
    client = PoolConnection(path, hello("engine"), descriptor, ignore, lambda: None)
    await until(lambda: calls >= 3)
    lines = [record.getMessage() for record in caplog.records]
    why = "go away" if b"go away" in answer else WHY
    assert [line for line in lines if why in line] == [
        f"the pool node at {path} cannot be used: {why}"
    ]
    await asyncio.to_thread(client.close)
    os.close(descriptor)
    server.close()
    await server.wait_closed()
