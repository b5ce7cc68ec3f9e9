"""No tenant takes what others need: sequences count, output is charged, engines are shared."""

from __future__ import annotations

import asyncio
import pathlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from prfaas.config.clusters import EngineTable
from prfaas.core.dispatch.types import RefusalReason, RefusedRequest
from prfaas.core.routing.decision import Decision, Path, Reason
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.gateway.conftest import World, running, until
from tests.gateway.scripted_engine import hang, stream_then_hang

KEYS = {name: new_key() for name in ("red", "blue")}
Start = Callable[..., AsyncIterator[World]]


@pytest.fixture
def start(checkpoint: pathlib.Path, identities: pathlib.Path, tmp_path: pathlib.Path) -> Any:
    @asynccontextmanager
    async def begin(engine: dict[str, Any] | None = None, **red: Any) -> AsyncIterator[World]:
        tables = {name: {"keys": [key_hash(key)]} for name, key in KEYS.items()}
        tables["red"] |= red
        engines = {"decode": engine or {}}
        state = tmp_path / "state"
        async with running(checkpoint, identities, state, tenants=tables, engines=engines) as world:
            yield world

    return begin


async def post(
    world: World, name: str, path: str = "/v1/completions", **body: Any
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    async with world.http.post(world.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


def tokens_left(world: World, name: str = "red") -> int:
    """Remaining tokens; below zero in debt."""
    bucket = world.gateway.tenants.by_name[name].quota.tokens
    assert bucket is not None
    return bucket._level // bucket._period_ns


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def ended(world: World, num: int) -> bool:
    records = world.gateway.records.latest(100)
    return sum(record.outcome.value != "running" for record in records) == num


# Charges


async def test_an_abandoned_answer_is_charged_for_every_sequence(start: Any) -> None:
    async with start(tokens_per_minute=1_000_000) as world:
        world.decode.script = hang
        before = tokens_left(world)
        asking = asyncio.create_task(post(world, "red", prompt="hi", n=128, max_tokens=1000))
        await until(lambda: len(world.decode.calls) == 1)
        # Charged while it runs: nobody starts a hundred before the first one is paid.
        assert before - tokens_left(world) >= 128_000
        await cancelled(asking)
        await until(lambda: ended(world, 1))
        # No answer has shown how fast the engine is: what the fastest can have made in the time.
        record = world.gateway.records.latest(1)[0]
        assert record.e2e_ns is not None
        made = record.num_abandoned_tokens
        assert 128 <= made <= min(128_000, 128 * (1000 * record.e2e_ns / 1e9 + 1))
        assert before - tokens_left(world) <= made + record.num_prompt_tokens
        sample = 'prfaas_tenant_tokens_total{kind="abandoned",tenant="red"}'
        assert await world.metric(sample) == made


async def test_an_answer_left_early_costs_what_the_engine_counts(start: Any) -> None:
    """400,000 tokens are declared, and nobody has seen an answer yet: engines count theirs."""
    async with start(tokens_per_minute=1_000_000) as world:
        engine = world.gateway.engines.by_name["decode"]
        world.decode.script, world.decode.num_running = hang, 10
        await world.gateway.engines.probes.look(engine)
        world.decode.num_made = 400
        await world.gateway.engines.probes.look(engine)
        rate = world.gateway.charging._engines
        assert (rate.most(10, 10**9) or 0) > 0
        asking = asyncio.create_task(post(world, "red", prompt="hi", n=100, max_tokens=4000))
        await until(lambda: len(world.decode.calls) == 1)
        await cancelled(asking)
        await until(lambda: ended(world, 1))
        record = world.gateway.records.latest(1)[0]
        assert record.e2e_ns is not None
        assert record.num_abandoned_tokens <= (rate.most(100, record.e2e_ns) or 0)


async def test_an_abandoned_answer_without_a_limit_is_not_charged_the_rest_of_the_model(
    start: Any,
) -> None:
    async with start(tokens_per_minute=1_000_000) as world:
        world.decode.script = hang
        messages = [{"role": "user", "content": "hi"}]
        url = "/v1/chat/completions"
        asking = asyncio.create_task(post(world, "red", url, messages=messages))
        await until(lambda: len(world.decode.calls) == 1)
        await cancelled(asking)
        await until(lambda: ended(world, 1))
        record = world.gateway.records.latest(1)[0]
        assert record.e2e_ns is not None
        assert 1 <= record.num_abandoned_tokens <= 1000 * record.e2e_ns / 1e9 + 1


async def test_an_abandoned_answer_costs_what_the_engine_can_have_made(start: Any) -> None:
    async with start(tokens_per_minute=10_000_000) as world:
        charging = world.gateway.charging
        charging._rate.observe(100, 1, 10**9)
        world.decode.script = hang
        asking = asyncio.create_task(post(world, "red", prompt="hi", n=2, max_tokens=1000))
        await until(lambda: len(world.decode.calls) == 1)
        await cancelled(asking)
        await until(lambda: ended(world, 1))
        record = world.gateway.records.latest(1)[0]
        assert 2 <= record.num_abandoned_tokens <= 2000
        assert record.e2e_ns is not None
        assert record.num_abandoned_tokens <= 2 * (100 * record.e2e_ns / 1e9 + 2)


async def test_a_stream_that_stalls_is_charged_on(start: Any) -> None:
    async with start() as world:
        world.gateway.charging._rate.observe(10**9, 1, 10**9)
        world.decode.words = ("a", " b", " c", " d")
        world.decode.script = stream_then_hang(2)
        headers = {"Authorization": f"Bearer {KEYS['red']}"}
        body = {"prompt": "hi", "stream": True, "max_tokens": 500}
        url = f"{world.url}/v1/completions"
        async with world.http.post(url, json=body, headers=headers) as response:
            for _ in range(2):
                await response.content.readuntil(b"\n\n")
        await until(lambda: ended(world, 1))
        record = world.gateway.records.latest(1)[0]
        assert record.num_output_tokens == 2
        assert record.num_abandoned_tokens == 498


async def test_a_whole_answer_costs_what_it_has(start: Any) -> None:
    async with start(tokens_per_minute=1_000_000) as world:
        before = tokens_left(world)
        status, body = await post(world, "red", prompt="hello", max_tokens=3000)
        assert status == 200
        await until(lambda: ended(world, 1))
        # Tokens come back with time: less is missing than was used, not more.
        assert before - tokens_left(world) <= body["usage"]["total_tokens"]


async def test_text_that_is_only_tokenised_costs_a_sixteenth(start: Any) -> None:
    async with start(tokens_per_minute=1) as world:
        before = tokens_left(world)
        status, _ = await post(world, "red", "/tokenize", prompt="x" * 1600)
        assert status == 200
        assert before - tokens_left(world) == 100


class Gate:
    """Lets tokenising begin, and end when it is opened."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        prompts = world.gateway._prompts
        self.begun, self._may_end = threading.Event(), threading.Event()
        for name in ("_make", "_words"):
            monkeypatch.setattr(prompts, name, self._held(getattr(prompts, name)))

    def open(self) -> None:
        self._may_end.set()

    def _held(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any) -> Any:
            self.begun.set()
            assert self._may_end.wait(50)
            return work(*args)

        return held


@pytest.mark.parametrize(
    ("path", "body", "cost"),
    [
        ("/v1/completions", {"prompt": "x" * 1600}, 100),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1600}]}, 100),
        ("/tokenize", {"prompt": "x" * 1600}, 100),
        ("/detokenize", {"tokens": [5] * 1600}, 100),
        ("/v1/completions", {"prompt": "word " * 2000}, 250),
    ],
)
async def test_a_client_that_leaves_pays_for_tokenising_that_has_begun(
    start: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], cost: int
) -> None:
    async with start(tokens_per_minute=1) as world:
        gate, before = Gate(world, monkeypatch), tokens_left(world)
        asking = asyncio.create_task(post(world, "red", path, **body))
        await until(gate.begun.is_set)
        await cancelled(asking)
        quota = world.gateway.tenants.by_name["red"].quota
        await until(lambda: quota.num_in_flight == 0)
        assert tokens_left(world) >= before
        gate.open()
        await until(lambda: cost <= before - tokens_left(world) < 1000)


async def test_a_prompt_that_gets_no_engine_costs_what_was_tokenised(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(tokens_per_minute=1) as world:
        before = tokens_left(world)

        def refuse(*_: Any, **__: Any) -> RefusedRequest:
            return RefusedRequest(
                RefusalReason.NO_INSTANCE, 1, Decision(Path.LOCAL, Reason.BELOW_THRESHOLD, 1, 1)
            )

        monkeypatch.setattr(world.gateway.driver.dispatcher, "decide", refuse)
        status, _ = await post(world, "red", prompt="x" * 1600)
        assert status == 503
        assert before - tokens_left(world) == 100


async def test_an_operator_who_looks_up_a_prompt_costs_its_tenant_nothing(start: Any) -> None:
    async with start(tokens_per_minute=1) as world:
        before = tokens_left(world)
        url = f"{world.url}/kv/lookup?tenant=red"
        async with world.http.post(url, json={"prompt": "x" * 1600}) as response:
            assert response.status == 200
        assert tokens_left(world) >= before


async def test_a_prompt_that_is_too_long_costs_what_was_tokenised(start: Any) -> None:
    async with start(tokens_per_minute=1) as world:
        before = tokens_left(world)
        status, body = await post(world, "red", prompt="word " * 2000)
        assert status == 400
        assert "at least" in body["error"]["message"]
        assert 250 <= before - tokens_left(world) < 1000
        status, _ = await post(world, "red", prompt="x")
        assert status == 429


# Sequences


@pytest.mark.parametrize("body", [{"prompt": ["a"] * 3}, {"prompt": "a", "n": 3}])
async def test_a_request_counts_by_its_sequences(start: Any, body: dict[str, Any]) -> None:
    async with start(requests_in_flight=4) as world:
        world.decode.script = hang
        asking = asyncio.create_task(post(world, "red", **body))
        await until(lambda: len(world.decode.calls) == 1)
        quota = world.gateway.tenants.by_name["red"].quota
        assert quota.num_in_flight == 3
        status, answer = await post(world, "red", prompt=["a", "b"])
        assert (status, quota.num_in_flight) == (429, 3)
        assert "4 requests at once" in answer["error"]["message"]
        status, answer = await post(world, "red", prompt=["a"] * 5)
        assert (status, answer["error"]["param"]) == (400, "n")
        await cancelled(asking)
        await until(lambda: quota.num_in_flight == 0)


# Slots


async def test_one_tenants_thousand_prompts_leave_room_for_anothers_one(start: Any) -> None:
    """Before, all 1,024 sequences were given to the engine, and blue's came last."""
    async with start({"sequences_max": 256}) as world:
        world.decode.script = hang
        many = [asyncio.create_task(post(world, "red", prompt=["a"] * 128)) for _ in range(8)]
        holding = world.gateway.parts.holding
        await until(lambda: holding.num_held("red") == 7 and len(world.decode.calls) == 1)
        assert await world.metric('prfaas_tenant_requests_held{tenant="red"}') == 7
        one = asyncio.create_task(post(world, "blue", prompt="hello"))
        await until(lambda: len(world.decode.calls) == 2)
        ahead = sum(len(call.body["prompt"]) for call in world.decode.calls[:1])
        assert ahead == 128
        assert len(world.decode.calls[1].body["prompt"]) == len("hello")
        # Who leaves the queue takes no slots, and who leaves the engine gives them back.
        await cancelled(*many[1:4])
        await until(lambda: holding.num_held("red") == 4)
        await cancelled(many[0])
        await until(lambda: len(world.decode.calls) == 3)
        await cancelled(one, *many)
        await until(lambda: holding.num_held("red") == 0)


async def test_a_request_that_would_take_the_reserve_is_refused(start: Any) -> None:
    async with start({"sequences_max": 256}) as world:
        status, answer = await post(world, "red", prompt=["a"] * 128, n=8)
        assert status == 400
        assert "1024 answers" in answer["error"]["message"]
        assert "240" in answer["error"]["message"]
        assert not world.decode.calls


async def test_a_single_tenant_is_not_held(world: World) -> None:
    world.decode.script = hang
    many = [asyncio.create_task(world.post({"prompt": ["a"] * 128})) for _ in range(4)]
    await until(lambda: len(world.decode.calls) == 4)
    await cancelled(*many)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, 256),
        ({"sequences_max": 9}, 9),
        ({"args": ["--max-num-seqs", "16"]}, 16),
        ({"args": ["--seed", "1", "--max-num-seqs=32"]}, 32),
        ({"args": ["--max-num-seqs", "many"]}, 256),
        ({"args": ["--max-num-seqs"]}, 256),
        ({"args": ["--max-num-seqs", "16"], "sequences_max": 9}, 9),
        ({"args": ["--max_num_seqs", "16"]}, 16),
        ({"args": ["--max-num-seqs", "16", "--max-num-seqs", "64"]}, 64),
        ({"args": ["--max-num-seqs", "0"]}, 256),
    ],
)
def test_an_engines_slots_are_what_it_is_started_with(table: dict[str, Any], expected: int) -> None:
    assert EngineTable(pool="p", **table).num_slots == expected


# Tokenising


async def test_another_tenants_digits_keep_nobody_waiting(start: Any) -> None:
    """Two threads are red's at most, whatever it sends; blue has its own."""
    async with start() as world:
        threads = world.gateway._prompts.threads
        body = {"prompt": "7" * 3900}
        many = [asyncio.create_task(post(world, "red", "/tokenize", **body)) for _ in range(20)]
        status, _ = await post(world, "blue", "/tokenize", prompt="hello " * 20)
        assert status == 200
        assert threads.num_threads <= 3
        assert {status for status, _ in await asyncio.gather(*many)} == {200}


async def test_digits_that_can_not_fit_are_not_tokenised(start: Any) -> None:
    async with start(tokens_per_minute=1) as world:
        before = tokens_left(world)
        status, answer = await post(world, "red", prompt="7" * 1_000_000)
        assert status == 400
        assert "1000000 digits" in answer["error"]["message"] or "characters" in str(answer)
        assert tokens_left(world) >= before
        assert not world.decode.calls


async def test_the_connection_of_a_held_request_may_close(start: Any) -> None:
    async with start({"sequences_max": 1}) as world:
        world.decode.script = hang
        first = asyncio.create_task(post(world, "red", prompt="a"))
        await until(lambda: len(world.decode.calls) == 1)
        timeout = aiohttp.ClientTimeout(total=0.2)
        headers = {"Authorization": f"Bearer {KEYS['blue']}"}
        with pytest.raises(asyncio.TimeoutError):
            await world.http.post(
                f"{world.url}/v1/completions",
                json={"prompt": "b"},
                headers=headers,
                timeout=timeout,
            )
        await until(lambda: world.gateway.parts.holding.num_held("blue") == 0)
        await cancelled(first)
        await until(lambda: ended(world, 2))
        assert len(world.decode.calls) == 1
