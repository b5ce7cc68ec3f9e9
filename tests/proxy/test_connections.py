"""Connections to the proxy: a site that opens too many, or idle ones, costs others nothing."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from aiohttp import web

from prfaas.proxy.connections import REFUSALS_MAX
from tests.pool.sites import until

from .worlds import BODY, Wire, connect, running


async def ask(wire: Wire, path: str = "/metrics") -> bytes:
    """Status line of an answer; empty where there is none."""
    reader, writer = wire
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: proxy\r\n\r\n".encode())
        return await reader.readline()
    except ConnectionError:
        return b""


async def test_a_site_at_its_limit_is_refused_and_others_are_not(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with (
        running(tmp_path, checkpoint, "connections_max = 3") as world,
        AsyncExitStack() as st,
    ):
        wires = []
        for _ in range(3 + REFUSALS_MAX + 20):
            wire = await connect(world, "a")
            st.callback(wire[1].transport.abort)
            wires.append(wire)
        open_ones = world.proxy.connections
        await until(lambda: open_ones["a"] == 3 + REFUSALS_MAX)
        assert world.metric("connections", site="a") == 3 + REFUSALS_MAX
        num_refused = REFUSALS_MAX + 20
        await until(lambda: world.metric("refused_total", reason="connections") == num_refused)
        answers = [await ask(wire) for wire in wires]
        assert [b" 200 " in answer for answer in answers] == [True] * 3 + [False] * (len(wires) - 3)
        assert sum(b" 429 " in answer for answer in answers) == REFUSALS_MAX
        # Refused ones end with the answer, and all of b are served meanwhile.
        await until(lambda: open_ones["a"] == 3)
        assert await world.post("b") == 200
        wires[0][1].transport.abort()
        await until(lambda: open_ones["a"] == 2)
        last = await connect(world, "a")
        st.callback(last[1].transport.abort)
        assert b" 200 " in await ask(last)


async def test_a_connection_without_a_request_ends(tmp_path: Path, checkpoint: Path) -> None:
    async with running(tmp_path, checkpoint) as world:
        world.proxy.connections.head_s = 0.2
        silent, slow = await connect(world, "a"), await connect(world, "a")
        slow[1].write(b"GET /health HTTP/1.1\r\nHost: ")
        for reader, writer in (silent, slow):
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.transport.abort()
        await until(lambda: world.proxy.connections["a"] == 0)


async def test_an_idle_connection_ends_and_a_prompt_that_takes_longer_does_not(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with running(tmp_path, checkpoint) as world:
        connections = world.proxy.connections
        connections.head_s = connections.idle_s = 0.1
        go = asyncio.Event()
        turns = world.proxy._turns
        async with turns.turn("b", "engine", 100):
            body = json.dumps(BODY).encode()
            reader, writer = await connect(world, "a")
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            await until(lambda: turns.queue.waiting_of("a", "engine"))
            asyncio.get_running_loop().call_later(0.3, go.set)
            await go.wait()
            assert connections["a"] == 1
        assert b" 200 " in await reader.readline()
        await until(lambda: connections["a"] == 0)
        writer.transport.abort()


async def test_the_engine_is_asked_for_a_page_once_a_second(
    tmp_path: Path, checkpoint: Path
) -> None:
    asked = 0

    async def health(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        behind = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with running(tmp_path, checkpoint, behind=behind) as world:
            loop = asyncio.get_running_loop()
            began = loop.time()
            pages = [world.get(site, "/health") for site in "ab" * 50]
            assert {status for status, _ in await asyncio.gather(*pages)} == {200}
            assert 1 <= asked <= 1 + int(loop.time() - began)
    finally:
        await runner.cleanup()
