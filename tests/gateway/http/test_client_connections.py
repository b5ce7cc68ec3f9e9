"""Connections that ask for nothing end, and leave room for those that ask; what is no HTTP."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas.gateway.http.connections import connections_max
from tests.gateway.conftest import World, until
from tests.gateway.scripted_engine import hang

HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(world: World, num_open: int | None = None) -> AsyncIterator[Streams]:
    """One connection; `num_open` says how many the gateway has then."""
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        if num_open is not None:
            await until(lambda: world.gateway.connections.num_open == num_open)
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    body = await reader.readexactly(int(fields[b"Content-Length"]))
    return int(head.split()[1]), json.loads(body)


async def ask(streams: Streams) -> int:
    streams[1].write(HEAD + b"\r\n")
    return (await answer(streams[0]))[0]


async def closed(world: World, reason: str) -> float:
    return await world.metric(f'prfaas_client_connections_closed_total{{reason="{reason}"}}')


@pytest.mark.parametrize("said", [b"", HEAD])
async def test_a_connection_without_a_request_ends(world: World, said: bytes) -> None:
    connections = world.gateway.connections
    usual_s, connections.head_s = connections.head_s, 0.05
    async with connected(world) as (reader, writer):
        writer.write(said)
        assert await reader.read() == b""
    connections.head_s = usual_s
    assert await closed(world, "no_request") == 1


async def test_a_connection_that_has_asked_is_kept(world: World) -> None:
    """Only the first head has the short limit."""
    connections = world.gateway.connections
    async with connected(world, 1) as kept:
        [connection] = connections._waiting
        assert connection._time_limit is not None
        for _ in range(2):
            assert await ask(kept) == 200
            await until(lambda: list(connections._kept) == [connection])
            assert connection._time_limit is None


async def test_who_is_idle_longest_makes_room(world: World) -> None:
    connections = world.gateway.connections
    await world.metric("prfaas_client_connections")
    await until(lambda: connections.num_busy == 0)
    before = connections.num_open
    connections.limit = before + 2
    async with (
        connected(world, before + 1) as first,
        connected(world, before + 2),
        connected(world) as third,
    ):
        assert await ask(third) == 200
        assert await first[0].read() == b""
        assert connections.num_open == before + 2
    assert await closed(world, "full") == 1


async def test_connections_with_requests_keep_their_places(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    connections, world.decode.script = world.gateway.connections, hang
    task = asyncio.create_task(world.post({"prompt": "hi"}))
    await world.decode.hanging.wait()
    await until(lambda: connections.num_open == connections.num_busy == 1)
    connections.limit = 1
    for _ in range(3):
        async with connected(world) as (reader, _):
            status, body = await answer(reader)
            assert (status, await reader.read()) == (503, b"")
            assert body["error"]["type"] == "ServiceUnavailableError"
    assert connections.num_open == connections.num_busy == 1
    assert caplog.text.count("connections_full") == 1
    connections.limit = 9
    assert await closed(world, "refused") == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: connections.num_busy == 0)


@pytest.mark.parametrize(("soft", "most"), [(1024, 341), (1 << 20, 16384), (-1, 16384), (2, 1)])
def test_the_bound_leaves_descriptors_for_engines(
    monkeypatch: pytest.MonkeyPatch, soft: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, -1))
    assert connections_max(4096) == most


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n", 400),
        (HEAD + b"Cookie: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (HEAD + b"a b: c\r\n\r\n", 400),
        (HEAD + b"Expect: miracles\r\n\r\n", 417),
        (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", 400),
        (POST + b"Content-Encoding: rot13\r\nContent-Length: 2\r\n\r\n{}", 415),
        (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 400),
    ],
)
async def test_what_is_no_request_gets_an_error_of_openai_s_shape(
    world: World, data: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(world) as (reader, writer):
        writer.write(data)
        said, body = await answer(reader)
    assert said == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert len(body["error"]["message"]) < 400
    assert "Traceback" not in caplog.text
