"""A client that leaves takes its legs and its transfer along."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prfaas.gateway.http.responses import ClientGoneError, ClientStream
from prfaas.gateway.times import Times
from tests.gateway.conftest import World, running, until
from tests.gateway.long_requests import both_pools_heard_the_abort
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import Script, hang, stream_then_hang


async def test_during_prefill(world: World) -> None:
    world.prefill.script = hang
    request = asyncio.create_task(world.post({"prompt": LONG}))
    await world.prefill.hanging.wait()
    await leave(request)
    await world.prefill.gone.wait()
    await cancelled(world)
    assert not world.decode.calls


@pytest.mark.parametrize(("script", "stream"), [(hang, False), (stream_then_hang(2), True)])
async def test_during_decode(world: World, script: Script, stream: bool) -> None:
    world.decode.script = script
    request = asyncio.create_task(world.post({"prompt": LONG, "stream": stream}))
    await world.decode.hanging.wait()
    await leave(request)
    await world.decode.gone.wait()
    await cancelled(world)


async def test_just_before_the_head_of_its_stream() -> None:
    """Its connection is closed, and its handler is not cancelled yet."""
    said: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        stream = ClientStream(request)
        try:
            await stream.begin({})
        except ClientGoneError:
            said.append("gone")
        raise asyncio.CancelledError

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientError):
            await client.post(server.make_url("/"))
    assert said == ["gone"]


async def test_a_client_that_does_not_read(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Its buffers fill up, the request's time ends, and the connection is closed."""
    tables = {"gateway": {"request_timeout": "2s"}, "times": Times(error_s=0.05)}
    async with running(checkpoint, identities, tmp_path, **tables) as world:
        world.decode.words = ("x" * 1_000_000,) * 30
        _, writer = await asyncio.open_connection(
            "127.0.0.1", int(world.url.rpartition(":")[2]), limit=1
        )
        body = b'{"prompt": "hi", "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: len(world.gateway.records.latest(1)) == 1)
        record = world.gateway.records.latest(1)[0]
        await until(lambda: record.outcome == "timed_out" and record.e2e_ns is not None)
        await world.decode.gone.wait()
        writer.transport.abort()


async def leave(request: asyncio.Task[object]) -> None:
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def cancelled(world: World) -> None:
    await both_pools_heard_the_abort(world)
    await until(lambda: world.gateway.records.latest(1)[0].outcome == "cancelled")
    assert await world.metric('prfaas_requests_total{outcome="cancelled",path="remote"}') == 1
    assert await world.metric("prfaas_requests_in_flight") == 0
    assert all(engine.num_in_flight == 0 for engine in world.gateway.engines.by_name.values())
