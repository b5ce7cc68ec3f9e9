"""A decode engine dies within its stream; the client sees one answer, whole and once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.resilience.budgets import Budget, BudgetSettings

from .conftest import World, running, until
from .scripted_engine import die_after, hang, send
from .talking import Speech, patient, stream, text_of, usage_of

TEXT = "Grüße, 世界! 👋🏽 one two three"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
async def pair(world: World) -> World:
    """Two engines that decode."""
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    return world


def talk(world: World, checkpoint: Path, text: str = TEXT, **more: Any) -> Speech:
    speech = Speech.of(checkpoint, text, **more)
    world.decode.script = world.spare.script = speech.script
    return speech


@pytest.mark.parametrize("how", ["abort", "error"])
@pytest.mark.parametrize("dies", [0, 1, 3, 5, 8, 13])
async def test_a_chat_goes_on_elsewhere(pair: World, checkpoint: Path, how: str, dies: int) -> None:
    speech = talk(pair, checkpoint, how=how, dies=[dies])
    body = CHAT | {"stream_options": {"include_usage": True}, "max_tokens": 100}
    events = await stream(pair, body)
    assert text_of(events) == TEXT
    assert len({(event["id"], event["created"]) for event in events}) == 1
    roles = [c["delta"].get("role") for e in events for c in e["choices"]]
    assert roles[0] == "assistant"
    assert not any(roles[1:])
    finishes = [c["finish_reason"] for e in events for c in e["choices"]]
    assert finishes[-1] == "stop"
    assert not any(finishes[:-1])
    assert not any(c.get("token_ids") for e in events for c in e["choices"])
    assert speech.prompt is not None
    num_prompt, num_text = len(speech.prompt), len(speech.ids)
    assert usage_of(events) == (num_prompt, num_text, num_prompt + num_text)
    record = await pair.record()
    assert record["outcome"] == "finished"
    assert record["num_output_tokens"] == num_text
    assert record["fallback"]["stage"] == "decode"
    assert await pair.metric('prfaas_retries_total{outcome="made"}') == 1
    for engine in pair.gateway.engines.by_name.values():
        assert engine.num_in_flight == 0
    assert len(pair.gateway.driver.dispatcher.requests) == 0


@pytest.mark.parametrize("stop", [["two"], ["x", "e two t"], ["👋🏽 one"], ["zzz"], ["!", " "]])
async def test_stop_strings_across_the_seam(pair: World, checkpoint: Path, stop: list[str]) -> None:
    """Whichever token is the last one of the first engine, the answer is the same."""
    speech = talk(pair, checkpoint)
    body = {"prompt": "hi", "stream": True, "stop": stop, "max_tokens": 100}
    body["stream_options"] = {"include_usage": True}
    whole = await stream(pair, body)
    finish = whole[-2]["choices"][0]
    patient(pair)
    for dies in range(len(whole) + 1):
        speech.dies = [dies, dies]
        events = await stream(pair, body)
        assert text_of(events) == text_of(whole), dies
        assert usage_of(events) == usage_of(whole), dies
        last = events[-2]["choices"][0]
        for key in ("finish_reason", "stop_reason"):
            assert last[key] == finish[key], dies


async def test_what_the_second_engine_is_asked(pair: World, checkpoint: Path) -> None:
    speech = talk(pair, checkpoint, "abcdefgh", dies=[3, 3])
    body = {"prompt": "hi", "stream": True, "max_tokens": 7, "min_tokens": 5, "seed": 1}
    events = await stream(pair, body | {"temperature": 0.5})
    assert text_of(events) == "abcdefg"
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    calls = sorted([*pair.decode.calls, *pair.spare.calls], key=lambda c: len(c.body["prompt"]))
    assert speech.prompt is not None
    asked = [
        (len(c.body["prompt"]) - len(speech.prompt), c.body["max_tokens"], c.body["min_tokens"])
        for c in calls
    ]
    assert asked == [(0, 7, 5), (3, 4, 2), (6, 1, 0)]
    assert {call.body["seed"] for call in calls} == {1}


async def test_usage_in_every_chunk_goes_on_counting(pair: World, checkpoint: Path) -> None:
    talk(pair, checkpoint, "abcdef", dies=[2])
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hi", "stream": True, "max_tokens": 9, "stream_options": options}
    events = await stream(pair, body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [1, 2, 3, 4, 5, 6, 6]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("num_lines", [6, 7])
async def test_an_engine_that_dies_after_its_last_token(
    pair: World, checkpoint: Path, num_lines: int
) -> None:
    """Nobody has to go on: only the end of the stream is missing."""
    talk(pair, checkpoint, "abcdef", dies=[num_lines])
    options = {"include_usage": True}
    body = {"prompt": "hi", "stream": True, "max_tokens": 9, "stream_options": options}
    events = await stream(pair, body)
    assert text_of(events) == "abcdef"
    assert usage_of(events) == (2, 6, 8)
    assert [bool(event["choices"]) for event in events] == [True] * 6 + [False]
    assert len(pair.decode.calls) + len(pair.spare.calls) == 1
    assert (await pair.record())["outcome"] == "finished"


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"logprobs": 1},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"stop": ["x"], "min_tokens": 3},
        {"bad_words": ["x"]},
        {"return_token_ids": True},
        {"repetition_detection": {"max_pattern_size": 9}},
    ],
)
async def test_what_can_not_be_continued_right_is_not(pair: World, extra: dict[str, Any]) -> None:
    pair.decode.script = pair.spare.script = die_after(2)
    events = await stream(pair, {"prompt": "hi", "stream": True} | extra)
    assert "error" in events[-1]
    [call] = [*pair.decode.calls, *pair.spare.calls]
    assert call.body.get("return_token_ids") == extra.get("return_token_ids")
    assert (await pair.record())["outcome"] == "failed"


@pytest.mark.parametrize("extra", [{"frequency_penalty": 0}, {"n": 1, "logprobs": None}])
async def test_what_is_switched_off_does_not_count(
    pair: World, checkpoint: Path, extra: dict[str, Any]
) -> None:
    talk(pair, checkpoint, "abcdef", dies=[2])
    body = {"prompt": "hi", "stream": True, "max_tokens": 9} | extra
    assert text_of(await stream(pair, body)) == "abcdef"


async def test_engines_that_do_not_tell_their_tokens(pair: World, checkpoint: Path) -> None:
    talk(pair, checkpoint, "abcdef", dies=[2], with_ids=False)
    events = await stream(pair, {"prompt": "hi", "stream": True, "max_tokens": 9})
    assert "no other can continue" in events[-1]["error"]["message"]


async def test_over_budget_nothing_is_run_again(pair: World, checkpoint: Path) -> None:
    talk(pair, checkpoint, "abcdef", dies=[2])
    pair.gateway.fleet.retries = Budget(BudgetSettings(0, 0.001, 0))
    events = await stream(pair, {"prompt": "hi", "stream": True, "max_tokens": 9})
    assert "error" in events[-1]
    assert await pair.metric('prfaas_retries_total{outcome="over_budget"}') == 1


async def test_with_a_single_engine_nothing_is_asked_for(world: World, checkpoint: Path) -> None:
    world.gateway.engines.remove("spare")
    talk(world, checkpoint, "abcdef")
    events = await stream(world, {"prompt": "hi", "stream": True, "max_tokens": 9})
    assert text_of(events) == "abcdef"
    assert "return_token_ids" not in world.decode.calls[0].body


async def test_a_whole_answer_is_made_again(pair: World) -> None:
    from aiohttp import web

    async def half(engine: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        pair.decode.script = pair.spare.script = None
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id":')
        assert request.transport is not None
        request.transport.abort()
        return response

    pair.decode.script = pair.spare.script = half
    status, reply = await pair.post({"prompt": "hi"})
    assert status == 200
    assert reply["choices"][0]["text"] == "Hello there!"
    assert (await pair.record())["fallback"] == {"stage": "decode", "reason": "broken"}
    assert pair.gateway.metrics.totals().num_fallbacks == 0  # of offloaded requests


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_that_answers_500_is_passed_over(pair: World, streamed: bool) -> None:
    from aiohttp import web

    async def dead(*_: object) -> web.StreamResponse:
        pair.decode.script = pair.spare.script = None
        return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)

    pair.decode.script = pair.spare.script = dead
    url = f"{pair.url}/v1/completions"
    async with pair.http.post(url, json={"prompt": "hi", "stream": streamed}) as response:
        assert response.status == 200
        assert "there" in await response.text()


async def test_an_engine_whose_host_is_gone(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """It closes no connection; that it does not answer when it is looked at has to do."""
    limits = {"connect_timeout": "300ms"}
    async with running(checkpoint, identities, tmp_path, gateway=limits) as world:
        world.spare.healthy = True
        await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
        world.gateway.driver.set_drained("spare", 0, drained=True)
        speech = talk(world, checkpoint, "abcdef")

        async def stops(engine: Any, request: Any, body: dict[str, Any]) -> Any:
            response = await engine.begin_stream(request)
            speech.prompt = body["prompt"]
            await send(response, speech.lines(body)[0])
            engine.frozen.set()
            return await hang(engine, request, body)

        world.decode.script = stops
        body = {"prompt": "hi", "stream": True, "max_tokens": 9}
        asking = asyncio.create_task(stream(world, body))
        await world.decode.hanging.wait()
        world.gateway.driver.set_drained("spare", 0, drained=False)
        assert text_of(await asking) == "abcdef"
        assert (await world.record())["fallback"] == {"stage": "decode", "reason": "unreachable"}
