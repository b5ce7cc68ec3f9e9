"""Relay decode: the engine that prefills goes on with the stream until its blocks have arrived, and
the answer is the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.wire.messages.gateway import LinkTelemetry

from .conftest import World, running, until
from .long_requests import both_pools_heard_the_abort
from .prompts import LONG
from .scripted_engine import hang, refuse, send
from .talking import Speech, ask, kv_orders, stream, text_of, usage_of

TEXT = "Grüße, 世界! 👋🏽 one two"
SAMPLED = {"temperature": 0.7}
BODY = {"prompt": LONG, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
SLOW = LinkTelemetry(
    age_ns=0,
    goodput_bits_per_s=50_000,
    rtt_ns=40_000_000,
    queued_bytes=0,
    in_flight_bytes=0,
    retransmits=0,
    delivery_bits_per_s=0,
    window_segments=0,
    num_connections=2,
)
"""A link that takes seconds for the blocks of a prompt."""


async def slow_link(world: World, told: LinkTelemetry = SLOW) -> None:
    world.prfaas_pool.telemetry = {"pd-pool": told}
    world.prfaas_pool.tell_state()
    await until(lambda: bool(world.gateway.pools.telemetry()))


@pytest.fixture
async def slow(world: World) -> World:
    await slow_link(world)
    return world


@pytest.fixture
async def always(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    routing = {"relay_decode": "always", "transfer_timeout": "300ms"}
    async with running(checkpoint, identities, tmp_path / "always", routing=routing) as made:
        await slow_link(made)
        yield made


class Relay:
    """Engines that say a text, of which the first one pauses after so many events."""

    def __init__(self, world: World, speech: Speech, num_events: int, *, how: str = "") -> None:
        self.world, self.speech, self.num_events, self.how = world, speech, num_events, how
        self.more = asyncio.Event()
        speech.prompt = None
        for pool in (world.prfaas_pool, world.pd_pool):
            pool.tell_state()  # One that is silent for long counts as gone.
        for engine in (world.prefill, world.decode, world.spare):
            engine.script = speech.script
            engine.calls.clear()
        for event in (world.prefill.hanging, world.prefill.gone):
            event.clear()
        world.prefill.script = self.script

    async def script(self, engine: Any, request: Any, body: dict[str, Any]) -> Any:
        response = await engine.begin_stream(request)
        self.speech.prompt = body["prompt"]
        lines = self.speech.lines(body)
        for line in lines[: self.num_events]:
            await send(response, line)
        if self.num_events >= len(lines):
            await response.write(b"data: [DONE]\n\n")
            return response
        if self.how == "abort":
            request.transport.abort()
            return response
        if self.how == "waits":
            self.world.prefill.hanging.set()
            await self.more.wait()
            for line in lines[self.num_events :]:
                await send(response, line)
            await response.write(b"data: [DONE]\n\n")
            return response
        return await hang(engine, request, body)

    async def told(self) -> None:
        """Wait until the client has all that came before the pause."""
        await self.world.prefill.hanging.wait()
        lines = self.speech.lines(self.world.prefill.calls[-1].body)[: self.num_events]
        texts = [line["choices"][0]["text"] for line in lines]
        count = len(list(itertools.dropwhile(lambda text: not text, texts)))
        records = self.world.gateway.live.records
        await until(lambda: records.latest(1)[0].num_output_tokens >= count)

    def landed(self) -> None:
        """All blocks have come."""
        self.world.pd_pool.end_transfer(self.transfer, num_bytes=10**6)

    @property
    def prompt(self) -> list[int]:
        found: list[int] = self.world.prefill.calls[-1].body["prompt"]
        return found

    @property
    def transfer(self) -> str:
        found: str = kv_orders(self.world.prefill.calls[-1])["transfer"]
        return found


async def test_the_client_has_tokens_while_the_blocks_are_in_transit(
    slow: World, checkpoint: Path
) -> None:
    speech = Speech.of(checkpoint, TEXT, cached=320)
    relay = Relay(slow, speech, 6)
    asking = asyncio.create_task(stream(slow, BODY | SAMPLED))
    await relay.told()
    assert not slow.decode.calls
    relay.landed()
    events = await asking
    assert text_of(events) == TEXT
    assert usage_of(events)[:2] == (len(LONG), len(speech.ids))
    await slow.prefill.gone.wait()
    [prefill], [warm, decode] = slow.prefill.calls, slow.decode.calls
    assert (prefill.body["max_tokens"], prefill.body["stream"]) == (60, True)
    moved = decode.body["prompt"][len(LONG) :]
    assert moved == speech.ids[: len(moved)]
    assert len(moved) == 6
    assert decode.body["max_tokens"] == 60 - len(moved)
    assert (warm.body["prompt"], warm.body["max_tokens"]) == (decode.body["prompt"], 1)
    assert kv_orders(decode)["transfer"] == kv_orders(warm)["transfer"] == relay.transfer
    record = await slow.record()
    assert (record["relayed_tokens"], record["why_not_relay"]) == (5, "")
    assert (record["fallback"], record["prefilled_by"]) == (None, "prefill")
    assert record["gap_ms"] > 0
    assert await slow.metric("prfaas_relayed_tokens_total") == 5


STOPS: list[dict[str, Any]] = [
    {},
    {"stop": ["two"]},
    {"stop": ["界! ", "e o"]},
    {"stop": ["üße"]},
    {"stop": ["👋🏽 o", "zzz"]},
    {"stop": ["zz"], "top_k": 5, "repetition_penalty": 1.1},
    {"min_tokens": 12},
    {"max_tokens": 20},
]


@pytest.mark.parametrize("extra", STOPS, ids=str)
async def test_the_answer_is_that_of_one_engine(
    slow: World, checkpoint: Path, extra: dict[str, Any]
) -> None:
    """Whatever token is the last of the relay: within a character, and within a stop string."""
    body = BODY | SAMPLED | extra
    speech = Speech.of(checkpoint, TEXT, cached=320)
    speech.prompt = None
    slow.decode.script = slow.prefill.script = speech.script
    expected = await ask(slow, body | {"stream_options": BODY["stream_options"], "seed": 1})
    speech.prompt = list(slow.decode.calls[-1].body["prompt"])
    num_events = len(speech.lines(body | {"prompt": speech.prompt})) - 1
    # A leg that is stopped does not report what it found: its route counted on nothing.
    expected[1]["prompt_tokens_details"]["cached_tokens"] = 0
    for number in range(1 + STOPS.index(extra) % 3, num_events, 3):
        relay = Relay(slow, speech, number)
        asking = asyncio.create_task(ask(slow, body))
        await relay.told()
        relay.landed()
        assert await asking == expected, number
        record = await slow.record()
        assert (record["num_prompt_tokens"], record["outcome"]) == (len(LONG), "finished")
        assert record["num_output_tokens"] == expected[1]["completion_tokens"]
        assert record["fallback"] is None
    assert len(slow.gateway.driver.dispatcher.requests) == 0
    slow.gateway.driver.dispatcher.validate()


async def test_the_text_of_a_token_is_what_its_engine_says(slow: World, checkpoint: Path) -> None:
    """A tokenizer may say otherwise, behind a prompt that ends within a character."""
    speech = Speech.of(checkpoint, "abcdefgh", cached=320)
    relay = Relay(slow, speech, 4)
    lines = speech.lines

    def loud(body: dict[str, Any]) -> list[dict[str, Any]]:
        made = lines(body)
        if body["prompt"] == speech.prompt:
            for line in made[:4]:
                line["choices"][0]["text"] = line["choices"][0]["text"].upper()
        return made

    speech.lines = loud  # type: ignore[method-assign]
    asking = asyncio.create_task(ask(slow, BODY | SAMPLED))
    await relay.told()
    relay.landed()
    said, usage, *_ = await asking
    assert (said, usage["completion_tokens"]) == ("ABCDefgh", 8)


async def test_nothing_is_relayed_that_could_change(slow: World, checkpoint: Path) -> None:
    speech = Speech.of(checkpoint, TEXT)
    for extra, why in (
        ({"temperature": 0}, "greedy"),
        (SAMPLED | {"stream": False, "stream_options": None}, "no stream"),
        (SAMPLED | {"seed": 1}, "seed"),
        (SAMPLED | {"max_tokens": 1}, ""),
    ):
        speech.prompt = None
        for engine in (slow.prefill, slow.decode):
            engine.script = speech.script
        await ask(slow, {key: value for key, value in (BODY | extra).items() if value is not None})
        record = await slow.record()
        assert why in record["why_not_relay"]
        assert slow.prefill.calls[-1].body["max_tokens"] == 1
        assert record["relayed_tokens"] == 0


async def test_no_relay_over_a_fast_link(world: World, checkpoint: Path) -> None:
    await slow_link(world, msgspec.structs.replace(SLOW, goodput_bits_per_s=10**9))
    speech = Speech.of(checkpoint, TEXT)
    world.prefill.script = world.decode.script = speech.script
    assert (await ask(world, BODY | SAMPLED))[0] == TEXT
    assert world.prefill.calls[0].body["max_tokens"] == 1
    assert (await world.record())["why_not_relay"] == "the blocks are expected soon"


async def test_a_greedy_answer_goes_on_from_its_relay_if_it_is_to(
    always: World, checkpoint: Path
) -> None:
    speech = Speech.of(checkpoint, TEXT, cached=320)
    relay = Relay(always, speech, 6)
    asking = asyncio.create_task(ask(always, BODY | {"temperature": 0}))
    await relay.told()
    relay.landed()
    assert (await asking)[0] == TEXT
    assert always.decode.calls[0].body["prompt"] == [*relay.prompt, *speech.ids[:6]]


@pytest.mark.parametrize("how", ["abort", "hang", "limit", "link_lost", "pool"])
async def test_a_relay_that_ends_early_leaves_the_rest_to_decode(
    always: World, checkpoint: Path, how: str
) -> None:
    """It dies; it hangs, and its blocks never come; it has made its tokens; its blocks are lost."""
    text = TEXT * 40 if how == "limit" else TEXT
    speech = Speech.of(checkpoint, text, cached=320)
    relay = Relay(always, speech, 2000 if how == "limit" else 6, how=how)
    if how == "limit":
        await slow_link(always, msgspec.structs.replace(SLOW, goodput_bits_per_s=160_000))
    asking = asyncio.create_task(ask(always, BODY | SAMPLED | {"max_tokens": 2000}))
    if how in ("link_lost", "pool"):
        await relay.told()
    if how == "link_lost":
        always.pd_pool.end_transfer(relay.transfer, "link_lost", num_bytes=0)
    elif how == "pool":
        always.pd_pool.disconnect()
    said, usage, *_ = await asking
    assert said == text
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(LONG), len(speech.ids))
    record = await always.record()
    assert record["outcome"] == "finished"
    assert record["relayed_tokens"] >= 5
    if how == "abort":
        assert record["fallback"]["stage"] == "prefill"
        assert record["prefilled_by"] == "prefill"
        assert kv_orders(always.decode.calls[0])["transfer"] == relay.transfer
    elif how == "limit":
        # The last character had not come whole.
        asked = always.prefill.calls[0].body["max_tokens"]
        assert asked - 4 < 1 + record["relayed_tokens"] <= asked < len(speech.ids)
    assert len(always.gateway.driver.dispatcher.requests) == 0
    always.gateway.driver.dispatcher.validate()


@pytest.mark.parametrize(
    ("extra", "text"), [({}, TEXT), ({"stop": ["one"]}, TEXT[:-7]), ({"max_tokens": 8}, "Grüße,")]
)
async def test_an_answer_that_ends_in_its_relay(
    slow: World, checkpoint: Path, extra: dict[str, Any], text: str
) -> None:
    speech = Speech.of(checkpoint, TEXT, cached=320)
    Relay(slow, speech, 1000)
    said, usage, reason, _ = await ask(slow, BODY | SAMPLED | extra)
    assert (said, reason) == (text, "length" if "max_tokens" in extra else "stop")
    assert usage["prompt_tokens_details"]["cached_tokens"] == 320
    assert not slow.decode.calls
    record = await slow.record()
    assert (record["outcome"], record["fallback"]) == ("finished", None)
    assert record["relayed_tokens"] == usage["completion_tokens"] - 1
    await both_pools_heard_the_abort(slow)
    assert len(slow.gateway.driver.dispatcher.requests) == 0


async def test_a_client_that_leaves_during_a_relay(slow: World, checkpoint: Path) -> None:
    relay = Relay(slow, Speech.of(checkpoint, TEXT), 6)
    asking = asyncio.create_task(stream(slow, BODY | SAMPLED))
    await relay.told()
    asking.cancel()
    await slow.prefill.gone.wait()
    await both_pools_heard_the_abort(slow)
    await until(lambda: len(slow.gateway.driver.dispatcher.requests) == 0)
    assert (await slow.record())["outcome"] == "cancelled"
    slow.gateway.driver.dispatcher.validate()


@pytest.mark.parametrize("end", ["leaves", "ends"])
async def test_the_end_of_a_request_whose_decode_engine_is_being_warmed(
    slow: World, checkpoint: Path, end: str
) -> None:
    """Its client leaves, or the relay makes all of the answer meanwhile."""
    speech = Speech.of(checkpoint, TEXT)
    relay = Relay(slow, speech, 6, how="waits" if end == "ends" else "")
    slow.decode.script = hang
    for event in (slow.decode.hanging, slow.decode.gone):
        event.clear()
    asking = asyncio.create_task(ask(slow, BODY | SAMPLED))
    await relay.told()
    relay.landed()
    await slow.decode.hanging.wait()
    if end == "ends":
        relay.more.set()
        said, *_ = await asking
        assert said == TEXT
    else:
        asking.cancel()
    await slow.decode.gone.wait()
    await until(lambda: len(slow.gateway.driver.dispatcher.requests) == 0)
    [warm] = slow.decode.calls
    assert warm.body["max_tokens"] == 1
    record = await slow.record()
    assert record["outcome"] == ("finished" if end == "ends" else "cancelled")
    slow.gateway.driver.dispatcher.validate()


async def test_a_warm_leg_that_fails_is_no_failure(slow: World, checkpoint: Path) -> None:
    speech = Speech.of(checkpoint, TEXT, cached=320)
    relay, no = Relay(slow, speech, 6), refuse(500)

    async def script(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        says = no if body["max_tokens"] == 1 else speech.script
        return await says(engine, request, body)

    slow.decode.script = script
    asking = asyncio.create_task(ask(slow, BODY | SAMPLED))
    await relay.told()
    relay.landed()
    said, *_ = await asking
    assert said == TEXT
    assert (await slow.record())["fallback"] is None
    assert [call.body["max_tokens"] for call in slow.decode.calls] == [1, 54]


async def test_a_decode_engine_that_refuses_the_longer_prompt(
    slow: World, checkpoint: Path
) -> None:
    relay = Relay(slow, Speech.of(checkpoint, TEXT), 6)
    slow.decode.script = refuse(400)
    asking = asyncio.create_task(stream(slow, BODY | SAMPLED))
    await relay.told()
    relay.landed()
    *events, last = await asking
    assert text_of(events) == TEXT[:4]
    assert last["error"]["code"] == 400
    assert (await slow.record())["outcome"] == "rejected"


async def test_another_prompt_before_the_engine_stops_the_relay(
    slow: World, checkpoint: Path
) -> None:
    """It would delay it, and step as slowly as that is computed."""
    relay = Relay(slow, Speech.of(checkpoint, TEXT), 1)
    slow.prefill.num_waiting = 1

    async def script(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        if len(body["prompt"]) != len(LONG):
            return await hang(engine, request, body)
        await engine.hanging.wait()
        return await relay.script(engine, request, body)

    slow.prefill.script = script
    asking = asyncio.create_task(ask(slow, BODY | SAMPLED))
    await until(lambda: bool(slow.prefill.calls))
    transfer = relay.transfer
    other = asyncio.create_task(slow.post(BODY | {"prompt": LONG + "and more"}))
    said, *_ = await asking
    other.cancel()
    assert said == TEXT
    assert kv_orders(slow.decode.calls[0])["transfer"] == transfer
    record = await slow.record(1)
    assert (record["relayed_tokens"], record["first_token_from"]) == (0, "prefill")
    assert "busy" in record["why_not_relay"]
