"""Connections to engines are used again."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from tests.gateway.conftest import World, until
from tests.gateway.scripted_engine import ScriptedEngine


async def test_an_answer_that_ends_after_its_end_mark_keeps_its_connection(world: World) -> None:
    """The client has its answer before, and what comes behind the mark is read without it."""
    peers, may_end = [], asyncio.Event()

    async def slow_to_end(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        response = await engine.answer(request, body)
        await may_end.wait()
        return response

    world.decode.script = slow_to_end
    engines = world.gateway.engines
    for _ in range(8):
        may_end.clear()
        body = {"prompt": "hi", "stream": True}
        async with world.http.post(world.url + "/v1/completions", json=body) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        await until(lambda: len(engines._ending) == 1)
        may_end.set()
        await until(lambda: not engines._ending)
    # The looks at the engine take connections from the same pool.
    assert len(peers) == 8
    assert len(set(peers)) <= 3


async def test_a_connection_is_not_used_again_after_an_error_of_the_engine(world: World) -> None:
    """The engine's server closes it then, right behind the answer: the next request would fail."""
    failed, used = set[int](), set[int]()

    async def fails(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        assert request.transport is not None
        port = request.transport.get_extra_info("peername")[1]
        used.add(port)
        assert port not in failed
        if body["prompt"][0] % 2:
            return await engine.answer(request, body)
        failed.add(port)
        return web.json_response({"error": {"message": "'int' has no attribute"}}, status=500)

    world.decode.script = fails
    statuses = [(await world.post({"prompt": [20 + i]}))[0] for i in range(8)]
    assert statuses == [500, 200] * 4
    assert len(failed) >= 4
