"""A prompt that kills engines gets two of them at most; those beside it go on elsewhere."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.config.addresses import Endpoints
from prfaas.core.resilience.quarantine import Quarantine
from prfaas.gateway.times import Times
from prfaas.units import NS_PER_S
from tests.gateway.conftest import World, deployment_for, until
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import ScriptedEngine, hang

from .dying_engine import POISON

BODY = {"prompt": LONG, "max_tokens": 3}
PROMPT = [1] * 359 + [POISON]


async def die(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """The engine ends: the connection breaks, and it is not well any more."""
    engine.healthy = False
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def dead(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """As vLLM whose core has died: a 500, and it is not well any more."""
    engine.healthy = False
    return web.json_response({"error": {"message": "EngineCore died"}}, status=500)


@pytest.fixture
def times() -> Times:
    """No suspect survives by time."""
    return Times(suspect_survived_ns=600 * NS_PER_S)


@pytest.fixture
async def spared(world: World) -> World:
    """A world whose second PD engine is ready as well."""
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    return world


@pytest.mark.parametrize("script", [die, dead])
async def test_a_prompt_gets_no_third_engine(spared: World, script: Any) -> None:
    for engine in (spared.prefill, spared.decode, spared.spare):
        engine.script = script
    status, answer = await spared.post(BODY)
    assert status == 500
    assert answer["error"]["type"] == "PromptBreaksEnginesError"
    assert "2 engines died" in answer["error"]["message"]
    local = (spared.decode, spared.spare)
    assert sorted(len(engine.calls) for engine in local) == [0, 1]
    [alive] = [engine for engine in local if not engine.calls]
    alive.script = None
    status, _ = await spared.post(BODY)
    assert (status, len(alive.calls)) == (500, 0)
    status, _ = await spared.post(BODY | {"prompt": "another"})
    assert (status, len(alive.calls)) == (200, 1)
    assert await spared.metric('prfaas_suspect_prompts_total{outcome="refused"}') == 2
    assert len(spared.gateway.driver.dispatcher.requests) == 0


async def test_a_prompt_that_was_not_alone_in_the_second_engine_is_refused_for_a_short_time(
    spared: World,
) -> None:
    """An operator who ends two engines in turn bars no prompt that was in both for long."""

    async def crash(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        return await (die if len(body["prompt"]) > 9 else hang)(engine, request, body)

    local = (spared.decode, spared.spare)
    for engine in (spared.prefill, *local):
        engine.script = crash
    beside = [asyncio.create_task(spared.post(BODY | {"prompt": "hi"})) for _ in local]
    await until(lambda: all(len(engine.calls) == 1 for engine in local))
    status, answer = await spared.post(BODY)
    assert status == 500
    assert "for 30 s" in answer["error"]["message"]
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)


async def test_clients_are_told_not_to_try_again(spared: World) -> None:
    for engine in (spared.prefill, spared.decode, spared.spare):
        engine.script = die
    async with spared.http.post(f"{spared.url}/v1/completions", json=BODY) as response:
        assert response.headers["X-Should-Retry"] == "false"
        assert response.headers["X-Prfaas-Reject-Reason"] == "breaks_engines"


async def test_prompts_beside_it_are_cleared_by_their_first_token(spared: World) -> None:
    spared.prefill.script = die
    assert (await spared.post(BODY))[0] == 200
    assert await spared.metric('prfaas_suspect_prompts_total{outcome="cleared"}') == 1
    quarantine: Quarantine = spared.gateway.parts.suspects._quarantine
    assert len(quarantine) == 0


async def test_those_that_were_in_a_dead_engine_are_tried_one_after_the_other(
    spared: World,
) -> None:
    """The first of them runs alone; once it has its first token, two may run."""
    running, most, gate = 0, 0, asyncio.Event()

    async def crash(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        await gate.wait()
        return await die(engine, request, body)

    async def slow(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if len(spared.decode.calls) + len(spared.spare.calls) == 1:
            waits = 'prfaas_suspect_prompts_total{outcome="waited"}'
            while await spared.metric(waits) < 3:  # noqa: ASYNC110 - the counter signals nobody
                await asyncio.sleep(0.01)
            assert running == 1
        running -= 1
        return await engine.answer(request, body)

    spared.prefill.script, spared.decode.script, spared.spare.script = crash, slow, slow
    posts = [asyncio.create_task(spared.post(BODY | {"prompt": f"{n}{LONG}"})) for n in range(3)]
    await until(lambda: len(spared.prefill.calls) == 3)
    gate.set()
    assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 3
    assert most <= 2


async def test_one_prompt_that_many_sent_is_suspect_of_one_death_alone(spared: World) -> None:
    gate = asyncio.Event()

    async def crash(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        await gate.wait()
        return await die(engine, request, body)

    spared.prefill.script = crash
    posts = [asyncio.create_task(spared.post(BODY)) for _ in range(3)]
    await until(lambda: len(spared.prefill.calls) == 3)
    gate.set()
    assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 3
    assert len(spared.gateway.parts.suspects._quarantine) == 0


@pytest.mark.parametrize("times", [Times(suspect_survived_ns=NS_PER_S // 20)])
async def test_a_suspect_whose_answer_takes_long_holds_up_no_other_one(spared: World) -> None:
    gate, end = asyncio.Event(), asyncio.Event()

    async def crash(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        await gate.wait()
        return await die(engine, request, body)

    async def long(engine: ScriptedEngine, request: web.Request, body: Any) -> web.StreamResponse:
        await end.wait()
        return await engine.answer(request, body)

    spared.prefill.script, spared.decode.script, spared.spare.script = crash, long, long
    posts = [asyncio.create_task(spared.post(BODY | {"prompt": f"{n}{LONG}"})) for n in range(3)]
    await until(lambda: len(spared.prefill.calls) == 3)
    gate.set()
    await until(lambda: len(spared.decode.calls) + len(spared.spare.calls) == 3)
    end.set()
    assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 3


async def test_an_engine_that_drops_a_connection_and_lives_makes_no_suspect(
    spared: World,
) -> None:
    async def drop(engine: ScriptedEngine, request: web.Request, _: Any) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    spared.prefill.script = drop
    assert (await spared.post(BODY))[0] == 200
    assert await spared.metric('prfaas_suspect_prompts_total{outcome="waited"}') == 0


@asynccontextmanager
async def processes(names: tuple[str, ...]) -> AsyncIterator[dict[str, str]]:
    """Engines as processes; their URLs."""
    started: dict[str, asyncio.subprocess.Process] = {}
    try:
        for name in names:
            started[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.gateway.serving.dying_engine", name, stdout=PIPE
            )
        urls = {}
        for name, process in started.items():
            assert process.stdout is not None
            urls[name] = (await process.stdout.readline()).decode().strip()
        yield urls
    finally:
        for process in started.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_a_prompt_that_ends_real_processes_ends_two_of_three(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Without pools everything is prefilled at home, so three PD engines are at stake."""
    names = ("decode", "spare", "third")
    tables = {"engines": {"third": {}}, "routing": {"policy": "local"}}
    deployment = deployment_for(checkpoint, identities, tmp_path / "state", **tables)
    async with processes(names) as urls:
        nowhere = {"prfaas-pool": ("127.0.0.1", 9), "pd-pool": ("127.0.0.1", 9)}
        endpoints = Endpoints(urls | {"prefill": "http://127.0.0.1:9"}, nowhere)
        gateway = make_gateway(deployment, endpoints, poll_s=0.02)
        url = await gateway.start()
        try:
            await asked(url, [1, 2, 3], 200)
            await asked(url, PROMPT, 500)
            await asked(url, PROMPT, 500)
            await asked(url, [1, 2, 3], 200)
        finally:
            await gateway.close()


async def asked(url: str, prompt: list[int], expected: int) -> None:
    import aiohttp

    body = {"prompt": prompt, "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == expected, await response.text()
