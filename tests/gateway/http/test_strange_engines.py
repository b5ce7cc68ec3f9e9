"""Engines that say strange things of themselves count as silent, and are asked again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from prfaas.gateway.http.responses import ANSWER_BYTES_MAX
from tests.gateway.conftest import World, until
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import Script, ScriptedEngine, send


@pytest.mark.parametrize(
    "cards",
    [
        7,
        {"id": "tiny"},
        ["tiny"],
        [{"id": "tiny", "max_model_len": -1}],
        [{"id": "tiny", "max_model_len": "long"}],
        [{"id": ["tiny"], "max_model_len": 4096}],
    ],
)
async def test_an_engine_without_a_model_is_asked_until_it_has_one(
    world: World, cards: object
) -> None:
    spare = world.gateway.engines.by_name["spare"]
    world.spare.cards, world.spare.healthy = cards, True
    asked = world.spare.num_asked_models
    await until(lambda: world.spare.num_asked_models > asked + 1)
    assert not spare.is_ready
    world.spare.cards = None
    await until(lambda: spare.is_ready)


async def test_an_engine_that_says_too_much_has_an_unknown_queue(world: World) -> None:
    decode = world.gateway.engines.by_name["decode"]
    world.decode.padding = ANSWER_BYTES_MAX
    await until(lambda: decode.load.num_waiting is None)
    assert decode.is_ready
    world.decode.padding = 0
    await until(lambda: decode.load.num_waiting is not None)


def endless(status: int = 200, *, within_a_stream: bool = False) -> Script:
    """Answers with a string that has no end."""

    async def script(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        if within_a_stream:
            await send(response, engine.chunks(body, chat=False)[0])
        await response.write(b'data: {"text": "' if within_a_stream else b'{"text": "')
        while True:
            await response.write(b"x" * 2**20)

    return script


async def test_an_answer_without_an_end_is_an_error_that_says_so(world: World) -> None:
    world.decode.script = endless()
    status, answer = await world.post({"prompt": "hi"})
    assert status == 502
    assert "/v1/completions has more than 33,554,432 bytes" in answer["error"]["message"]
    assert "fewer" in answer["error"]["message"]
    await world.decode.gone.wait()


async def test_an_event_without_an_end_ends_its_stream_with_an_error(world: World) -> None:
    world.decode.script = endless(within_a_stream=True)
    body = {"prompt": "hi", "stream": True}
    async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
        *_, last, done, _ = (await response.text()).split("\n\n")
    message = json.loads(last.removeprefix("data: "))["error"]["message"]
    assert "stream has more than 33,554,432 bytes" in message
    assert done == "data: [DONE]"
    await world.decode.gone.wait()


async def test_of_an_error_without_an_end_the_client_gets_the_status(world: World) -> None:
    world.decode.script = endless(400)
    status, answer = await world.post({"prompt": "hi"})
    assert (status, answer["error"]["message"]) == (400, "the engine answers 400")
    await world.decode.gone.wait()


async def test_a_prefill_whose_answer_has_no_end_is_given_up(world: World) -> None:
    world.prefill.script = endless()
    status, _ = await world.post({"prompt": LONG})
    assert status == 200
    assert (await world.record())["fallback"] == {"stage": "prefill", "reason": "bad_answer"}
    await world.prefill.gone.wait()


async def test_a_stream_without_an_end_is_remembered_no_further_than_the_limit(
    world: World,
) -> None:
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)

    async def script(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await engine.begin_stream(request)
        choice = {"index": 0, "text": "x" * 2**20, "token_ids": [7] * 2**10}
        while True:
            await send(response, {"choices": [choice]})

    world.decode.script = world.spare.script = script
    body = {"prompt": "hi", "stream": True}
    async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
        *_, last, done, _ = (await response.read()).split(b"\n\n")
    message = json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert "stream has more than 33,554,432 bytes" in message
    assert done == b"data: [DONE]"
    await until(lambda: world.decode.gone.is_set() or world.spare.gone.is_set())
