"""The first token from the engine that prefills: the client has it early, and the answer is the
same."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prfaas.gateway.serving.decode_leg import DecodeLeg, StreamHandover
from prfaas.gateway.serving.request_state import StreamedAnswer
from tests.gateway.ctl_runner import run

from .conftest import World, running, until
from .long_requests import both_pools_heard_the_abort
from .prompts import LONG
from .scripted_engine import drop, hang, refuse, send
from .talking import Speech, ask, kv_orders, patient, stream, text_of, usage_of

TEXT = "Grüße, 世界! 👋🏽 one two three"
BODY = {"prompt": LONG, "max_tokens": 100, "temperature": 0}
STREAM = BODY | {"stream": True, "stream_options": {"include_usage": True}}
PAIR = [{"stream": True}, {"stream": False}]


@pytest.fixture
async def pair(world: World) -> World:
    """Two engines that decode."""
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    world.gateway.driver.set_drained("spare", 0, drained=True)
    return world


@pytest.fixture
async def plain(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    """The same without early tokens."""
    off = {"early_first_token": "off"}
    async with running(checkpoint, identities, tmp_path / "plain", routing=off) as made:
        yield made


def talk(world: World, checkpoint: Path, text: str = TEXT, **more: Any) -> Speech:
    speech = Speech.of(checkpoint, text, cached=320, **more)
    for engine in (world.prefill, world.decode, world.spare):
        engine.script = speech.script
    return speech


async def test_the_client_has_it_before_decode_says_anything(
    world: World, checkpoint: Path
) -> None:
    speech = talk(world, checkpoint)
    let_go = asyncio.Event()

    async def waits(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        await let_go.wait()
        return await speech.script(engine, request, body)

    world.decode.script = waits
    sampling = {"temperature": 0.7, "top_p": 0.9, "stop": ["zz"]}
    body = STREAM | sampling | {"max_tokens": 9}
    async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
        event = b":"
        while event.startswith(b":"):  # A busy machine gets a comment before.
            event = await response.content.readuntil(b"\n\n")
        first = json.loads(event[6:])
        assert first["choices"][0]["text"] == "G"
        assert first["choices"][0]["finish_reason"] is None
        await until(lambda: bool(world.decode.calls))
        record = await world.record()
        assert record["first_token_from"] == "prefill"
        let_go.set()
        rest = await response.text()
    assert '"Gr' not in rest
    [prefill], [decode] = world.prefill.calls, world.decode.calls
    for name, value in sampling.items():
        assert prefill.body[name] == decode.body[name] == value
    assert (prefill.body["max_tokens"], decode.body["max_tokens"]) == (1, 8)
    # Over the link comes the id of the token, and not those of the whole prompt before it.
    assert "return_token_ids" not in prefill.body
    assert first["choices"][0]["logprobs"] is None
    assert decode.body["prompt"] == [*prefill.body["prompt"], speech.ids[0]]
    assert kv_orders(decode)["transfer"] == kv_orders(prefill)["transfer"]
    record = await world.record()
    assert record["ttft_ms"] < record["second_ms"]
    shown = (await run("explain", record["request_id"], url=world.url)).output
    assert ", from prefill: it need not wait for the transfer, then the second after" in shown
    assert await world.metric('prfaas_first_tokens_total{from="prefill"}') == 1


KINDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": None},
    {"stop": ["two"]},
    {"stop": ["G"]},
    {"stop": ["Gr"]},
    {"stop": ["xGr", "rü", "Grz"]},
    {"stop": ["Grü", "G"]},
    {"stop": ["Gx", "Grüße, 世"]},
    {"min_tokens": 4},
    {"stop": ["zz"], "top_k": 5, "temperature": 0.3, "repetition_penalty": 1.1},
]
KINDS += [kind | {"temperature": 0.3} for kind in KINDS]


@pytest.mark.parametrize("text", [TEXT, "Grüße", "G", "世界", "ü"])
async def test_the_answer_is_the_same(
    world: World, plain: World, checkpoint: Path, text: str
) -> None:
    expected, speech = talk(plain, checkpoint, text), talk(world, checkpoint, text)
    for extra, body in itertools.product(KINDS, (STREAM, BODY)):
        expected.prompt = speech.prompt = None
        same = await ask(plain, body | extra)
        assert await ask(world, body | extra) == same, (body, extra)
        record, other = await world.record(), await plain.record()
        for key in ("num_prompt_tokens", "num_output_tokens", "cached_tokens", "outcome"):
            assert record[key] == other[key], (body, extra, key)
        assert record["fallback"] is None
        assert other["first_token_from"] == "decode"
        if text[0] == "G" and body is STREAM:
            assert record["first_token_from"] == "prefill"
    assert len(world.gateway.driver.dispatcher.requests) == 0


@pytest.mark.parametrize("more", PAIR)
@pytest.mark.parametrize("seam", ["drops", "doubles"])
async def test_a_token_that_is_dropped_or_doubled_is_seen(
    world: World, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seam: str, more: Any
) -> None:
    """The control: the tests above fail with such a seam."""
    from dataclasses import replace

    find_seam = StreamHandover.seam

    async def wrong(self: StreamHandover, exchange: Any, plan: Any) -> Any:
        rest, prompt = await find_seam(self, exchange, plan)
        *ids, last = prompt.sequences[0]
        return rest, replace(prompt, sequences=[ids if seam == "doubles" else [*ids, last, last]])

    monkeypatch.setattr(StreamHandover, "seam", wrong)
    talk(world, checkpoint, "GGGabc")
    sampled = {"max_tokens": 5, "temperature": 0.5}
    said, *_ = await ask(world, (STREAM if more["stream"] else BODY) | sampled)
    assert said != "GGGab"


async def test_a_greedy_token_that_comes_twice_is_seen(
    world: World, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamedAnswer, "_leave_out", lambda *_: None)
    talk(world, checkpoint, "Gabc")
    said, *_ = await ask(world, STREAM)
    assert said == "GGabc"


async def test_a_decode_engine_that_would_have_chosen_another_token(
    world: World, checkpoint: Path
) -> None:
    """The client has the first one already: decode goes on from that."""
    speech = talk(world, checkpoint)
    other = Speech.of(checkpoint, "Hm.", cached=320)

    async def differs(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        is_first = len(body["prompt"]) == len(LONG)
        return await (other if is_first else speech).script(engine, request, body)

    world.decode.script = differs
    said, usage, *_ = await ask(world, STREAM)
    assert said == TEXT
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(LONG), len(speech.ids))
    assert [len(call.body["prompt"]) - len(LONG) for call in world.decode.calls] == [0, 1]
    assert (await world.record())["fallback"] is None


WARM_WHOLE = BODY | {"temperature": 0.5}


@pytest.mark.parametrize(
    ("text", "body", "extra"),
    [
        ("G", STREAM, {}),
        ("G", WARM_WHOLE, {}),
        (TEXT, STREAM, {"stop": ["G"]}),
        (TEXT, STREAM, {"max_tokens": 1}),
        (TEXT, BODY, {"max_tokens": 1}),
        (TEXT, WARM_WHOLE, {"max_tokens": 1}),
    ],
)
async def test_an_answer_of_one_token_has_no_decode_leg(
    world: World, checkpoint: Path, text: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    talk(world, checkpoint, text)
    said, usage, *_ = await ask(world, body | extra)
    assert said == ("" if "stop" in extra else "G")
    assert usage["completion_tokens"] == 1
    assert not world.decode.calls
    record = await world.record()
    assert (record["outcome"], record["fallback"]) == ("finished", None)
    if "max_tokens" in extra:
        assert not kv_orders(world.prefill.calls[0])
        assert record["transfer_state"] is None
    else:
        await both_pools_heard_the_abort(world)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"seed": 1, "temperature": 0.5}, "seed"),
        ({"logprobs": 1}, "logprobs"),
        ({"n": 2, "temperature": 1}, "several"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"min_tokens": 2, "stop": ["a"]}, "min_tokens"),
        (
            {"stop": ["a"], "stream": False, "stream_options": None, "temperature": 1},
            "without stream",
        ),
        ({"stream": False, "stream_options": None}, "greedy without stream"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"spaces_between_special_tokens": False}, "spaces_between"),
    ],
)
async def test_what_might_change_is_left_to_one_engine(
    world: World, extra: dict[str, Any], why: str
) -> None:
    body = {key: value for key, value in (STREAM | extra).items() if value is not None}
    async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
    body = world.prefill.calls[0].body
    assert (body["temperature"], body["stream"], body["max_tokens"]) == (0, False, 1)
    assert why in (await world.record())["why_not_early"]
    assert await world.metric('prfaas_first_tokens_total{from="prefill"}') == 0


async def test_greedy_with_a_seed_has_one_answer(world: World, checkpoint: Path) -> None:
    talk(world, checkpoint)
    said, *_ = await ask(world, STREAM | {"seed": 1})
    assert said == TEXT
    assert (await world.record())["first_token_from"] == "prefill"


@pytest.mark.parametrize("more", PAIR)
@pytest.mark.parametrize("how", ["abort", "error"])
@pytest.mark.parametrize("dies", [0, 1, 2])
async def test_a_prefill_that_breaks_around_its_token(
    world: World, checkpoint: Path, dies: int, how: str, more: Any
) -> None:
    """The token counts once, whoever prefills after that."""
    speech = talk(world, checkpoint, how=how)

    async def breaks(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        world.prefill.script = speech.script
        if not body["stream"] and dies:
            return await speech.script(engine, request, body)
        speech.dies = [dies]
        return await speech.script(engine, request, body | {"stream": True, "stream_options": {}})

    world.prefill.script = breaks
    said, usage, *_ = await ask(world, STREAM if more["stream"] else BODY)
    assert said == TEXT
    num_tokens = len(speech.ids)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(LONG), num_tokens)
    record = await world.record()
    if more["stream"]:
        assert record["fallback"]["stage"] == "prefill"
        assert (record["first_token_from"] == "prefill") == (dies > 0)
    assert len(world.gateway.driver.dispatcher.requests) == 0


@pytest.mark.parametrize("more", PAIR)
@pytest.mark.parametrize("dies", [0, 1, 4])
async def test_a_decode_engine_that_breaks_after_it(
    pair: World, checkpoint: Path, dies: int, more: Any
) -> None:
    speech = talk(pair, checkpoint)
    patient(pair)

    async def breaks(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        pair.gateway.driver.set_drained("spare", 0, drained=False)
        if not body["stream"]:
            return await drop(engine, request, body)
        speech.dies = [dies]
        return await speech.script(engine, request, body)

    pair.decode.script = breaks
    said, usage, *_ = await ask(pair, STREAM if more["stream"] else BODY)
    assert said == TEXT
    assert usage["prompt_tokens"] == len(LONG)
    assert usage["completion_tokens"] == len(speech.ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 320


async def test_nobody_can_go_on(world: World, checkpoint: Path) -> None:
    talk(world, checkpoint)
    world.decode.script = drop
    events = await stream(world, STREAM)
    assert text_of(events[:-1]) == "G"
    assert "Server disconnected" in events[-1]["error"]["message"]
    assert len(world.gateway.driver.dispatcher.requests) == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("more", PAIR)
async def test_a_client_that_leaves(world: World, checkpoint: Path, phase: str, more: Any) -> None:
    talk(world, checkpoint)
    stuck = world.prefill if phase == "prefill" else world.decode
    stuck.script = hang
    body = STREAM if more["stream"] else BODY
    asking = asyncio.create_task(world.post(body))
    await stuck.hanging.wait()
    asking.cancel()
    await stuck.gone.wait()
    await both_pools_heard_the_abort(world)
    await until(lambda: len(world.gateway.driver.dispatcher.requests) == 0)
    assert (await world.record())["outcome"] == "cancelled"


@pytest.mark.parametrize("extra", [{}, {"max_tokens": 1}])
async def test_an_engine_that_takes_prompts_alone(
    world: World, checkpoint: Path, extra: dict[str, Any]
) -> None:
    """Such as one behind a proxy that several sites share."""
    speech = talk(world, checkpoint)

    async def strict(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        if "logprobs" in body:
            return await refuse(400)(engine, request, body)
        return await speech.script(engine, request, body)

    world.prefill.script = strict
    for num_asked in (2, 3):
        said, *_ = await ask(world, STREAM | extra)
        assert said == (TEXT[:1] if extra else TEXT)
        assert len(world.prefill.calls) == num_asked
        record = await world.record()
        assert (record["fallback"], record["first_token_from"]) == (None, "decode")


@pytest.mark.parametrize("status", [404, 429])
async def test_a_refusal_that_is_not_of_the_fields_leaves_early_tokens_on(
    world: World, checkpoint: Path, status: int
) -> None:
    """Of a model that is not there yet, or a full queue: the next prompt is another matter."""
    speech = talk(world, checkpoint)
    world.prefill.script = refuse(status)
    assert (await ask(world, STREAM))[0] == TEXT
    world.prefill.script = speech.script
    assert (await ask(world, STREAM))[0] == TEXT
    assert len(world.prefill.calls) == 2
    assert (await world.record())["first_token_from"] == "prefill"


@pytest.mark.parametrize("body", [STREAM, BODY])
async def test_a_last_token_without_a_finish_reason_is_answered_once(
    world: World, checkpoint: Path, body: dict[str, Any]
) -> None:
    speech = talk(world, checkpoint)

    async def says_no_end(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        speech.prompt = body["prompt"]
        lines = speech.lines(body)
        lines[0]["choices"][0]["finish_reason"] = None
        if not body.get("stream"):
            return web.json_response(speech.whole(lines))
        response = await engine.begin_stream(request)
        for line in lines:
            await send(response, line)
        await response.write(b"data: [DONE]\n\n")
        return response

    world.prefill.script = says_no_end
    async with asyncio.timeout(20):
        said, usage, *_ = await ask(world, body | {"max_tokens": 1})
    assert (said, usage["completion_tokens"]) == ("G", 1)
    assert (len(world.prefill.calls), len(world.decode.calls)) == (1, 0)
    assert len(world.gateway.driver.dispatcher.requests) == 0


async def test_a_hang_after_the_token(world: World, checkpoint: Path) -> None:
    """The token is out, and its engine says nothing more: its blocks are not waited for."""
    speech = talk(world, checkpoint)

    async def stops(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        response = await engine.begin_stream(request)
        speech.prompt = body["prompt"]
        await send(response, speech.lines(body)[0])
        return await hang(engine, request, body)

    world.prefill.script = stops
    asking = asyncio.create_task(stream(world, STREAM))
    await world.prefill.hanging.wait()
    world.prfaas_pool.disconnect()
    events = await asking
    assert text_of(events) == TEXT
    assert usage_of(events)[1] == len(speech.ids)


async def test_an_engine_that_gives_its_prefill_up_ends_no_answer(
    world: World, checkpoint: Path
) -> None:
    speech = talk(world, checkpoint)

    async def gives_up(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            return await speech.script(engine, request, body)
        response = await engine.begin_stream(request)
        speech.prompt = body["prompt"]
        [line, *_] = speech.lines(body)
        line["choices"][0].update(finish_reason="abort", text="", token_ids=[])
        await send(response, line)
        await response.write(b"data: [DONE]\n\n")
        return response

    world.prefill.script = gives_up
    said, _, why, _ = await ask(world, STREAM)
    assert (said, why) == (TEXT, "stop")


@pytest.mark.parametrize("temperature", [0, 0.7])
async def test_what_a_broken_leg_had_cached_is_not_counted(
    world: World, checkpoint: Path, temperature: float
) -> None:
    speech = talk(world, checkpoint, how="abort")

    async def breaks(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        world.prefill.script = speech.script
        speech.dies = [1]
        return await speech.script(engine, request, body)

    world.prefill.script = breaks
    said, usage, *_ = await ask(world, STREAM | {"temperature": temperature})
    assert said == TEXT
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stop_string_across_the_seam_costs_no_count_with_one_engine(
    world: World, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeLeg, "has_others", property(lambda _: False))
    talk(world, checkpoint, "abcdefgh")
    body = STREAM | {"temperature": 0.7, "stop": ["abcdef"]}
    _, usage, why, _ = await ask(world, body)
    assert (usage["completion_tokens"], why) == (6, "stop")
