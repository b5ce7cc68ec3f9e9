"""A pool node beside peers of the version before: it refuses in words that they understand."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.engines.pool_client import PoolClient
from prfaas.wire.frames import MAGIC, VERSION, VersionError
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.base import Goodbye, Message, Ping
from prfaas.wire.messages.codec import decode, encode
from prfaas.wire.messages.gateway import Subscribe
from prfaas.wire.messages.link import PoolHello

from .conftest import World
from .sites import LOOPBACK, PROMPT, hello, until

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
    client = PoolClient(path, hello("engine"), descriptor, ignore, lambda: None)
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
