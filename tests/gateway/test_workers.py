"""Several worker processes at one port: the same answers, decisions and books as one process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.gateway.http.errors import REASON_HEADER
from prfaas.logs import LogFormat
from prfaas.workers import messages
from prfaas.workers.worker import Start, Worker

from .conftest import World, children, deployment_for, running, until
from .scripted_engine import ScriptedEngine, hang, refuse
from .talking import Speech
from .tenant_keys import HASHES, bearer, tenants

LONG = [7 + i % 200 for i in range(160)]
TEXT = "Grüße, 世界! one two three"
_OF_LEG = ("transfer", "ticket", "source", "push_to")


def worked(checkpoint: Path, identities: Path, state: Path, workers: int) -> Any:
    """A world whose gateway has so many workers, two tenants and an operator."""
    limited = tenants(requests_per_minute=1)
    gateway = {"workers": workers, "operator_keys": [HASHES["operator"]]}
    return running(checkpoint, identities, state, gateway=gateway, tenants=limited)


class Sequence:
    """Requests one after another, and all that is to be the same however many workers there are."""

    def __init__(self, world: World) -> None:
        self.world, self.seen = world, list[object]()

    async def send(self, path: str, body: object = None, who: str = "blue", **headers: str) -> None:
        """Send a request, and note its answer, without what differs from run to run."""
        world, number = self.world, len(self.seen)
        sent = bearer(who) | {"X-Request-Id": f"request-{number}"} | headers
        method = "GET" if body is None else "POST"
        async with world.http.request(
            method, world.url + path, json=body, headers=sent
        ) as response:
            text = await response.text()
            told = {
                name: value
                for name, value in response.headers.items()
                if name not in ("Date", "Content-Length") and "reset" not in name
            }
            text = re.sub(r'"created":[0-9]{10}', "", text)
            self.seen.append((path, response.status, sorted(told.items()), text))

    async def records(self) -> list[object]:
        """The decider's notes of each request."""
        keys = bearer("operator")
        async with self.world.http.get(
            f"{self.world.url}/control/requests", headers=keys
        ) as response:
            records = (await response.json())["requests"]
        kept: tuple[str, ...] = (
            "request_id",
            "tenant",
            "path",
            "outcome",
            "error",
            "num_prompt_tokens",
        )
        kept += ("num_output_tokens", "cached_tokens", "prefill_engine", "decode_engine", "api")
        return [
            [record.get(name) for name in kept]
            + [(record.get("decision") or {}).get("reason"), bool(record.get("fallback"))]
            for record in records
        ]

    def legs(self) -> list[object]:
        """The requests to engines, but for the names of transfers."""
        engines = (self.world.prefill, self.world.decode, self.world.spare)
        return [
            (engine.name, call.path, call.headers.get("x-request-id"), _unnamed(call.body))
            for engine in engines
            for call in engine.calls
        ]


def _unnamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unnamed(each) for key, each in value.items() if key not in _OF_LEG}
    return value


async def transcript(world: World, speech: Speech) -> list[object]:
    """Run every kind of request, and return all that was seen."""
    run = Sequence(world)
    completions, chat = "/v1/completions", "/v1/chat/completions"
    hello = {"messages": [{"role": "user", "content": "hi"}]}
    await run.send(completions, {"prompt": "hi"})
    await run.send(completions, {"prompt": ["hi", "you"], "n": 2, "max_tokens": 3})
    await run.send(chat, hello)
    await run.send(chat, hello | {"stream": True, "stream_options": {"include_usage": True}})
    await run.send(completions, {"prompt": LONG})
    await run.send(completions, {"prompt": LONG, "stream": True})
    await run.send(completions, {"prompt": LONG, "stream": True, "seed": 3, "temperature": 1.0})
    await run.send(completions, {"prompt": "hi"}, who="red")
    await run.send(completions, {"prompt": "hi"}, who="red")
    await run.send(completions, {"prompt": "hi"}, Authorization="Bearer nobody")
    await run.send(completions, {"prompt": ""})
    await run.send(completions, {"prompt": [300_000]})
    await run.send(completions, {"prompt": "x" * 20_000})
    await run.send(completions, {"prompt": "hi", "max_tokens": 100_000})
    await run.send(completions, {"prompt": "hi"}, **{"X-Request-Timeout": "soon"})
    await run.send(chat, hello | {"model": "another"})
    await run.send("/v1/models")
    await run.send("/health")
    await run.send("/v1/nothing")
    await run.send("/control/requests", who="blue")
    world.decode.script = refuse(400, "no such thing")
    await run.send(completions, {"prompt": "hi", "stream": True})
    world.decode.script = refuse(503, "loading")
    await run.send(completions, {"prompt": "hi"})
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    for dies in (0, 2, 5):
        speech.dies, speech.prompt = [dies], None
        world.decode.script = world.spare.script = speech.script
        await run.send(chat, hello | {"stream": True, "max_tokens": 100})
    return [*run.seen, *await run.records(), *run.legs()]


async def test_two_workers_decide_as_one_process_does(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    found = []
    speech = Speech.of(checkpoint, TEXT, how="error")
    for workers in (1, 2):
        state = tmp_path / "state"
        async with worked(checkpoint, identities, state, workers) as world:
            found.append(await transcript(world, speech))
            assert len(world.gateway.driver.dispatcher.requests) == 0
    assert len(found[0]) == len(found[1]) > 60
    for one, two in zip(*found, strict=True):
        assert two == one


async def test_a_worker_that_is_killed_leaves_no_booking(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    before = children()
    async with worked(checkpoint, identities, tmp_path / "state", 2) as world:
        engines, requests = world.gateway.engines.by_name, world.gateway.driver.dispatcher.requests
        world.decode.script = hang
        asked = [
            asyncio.create_task(
                world.http.post(
                    f"{world.url}/v1/completions", json={"prompt": "hi"}, headers=bearer("blue")
                )
            )
            for _ in range(4)
        ]
        await until(lambda: engines["decode"].num_in_flight == 4)
        assert len(requests) == 4
        killed = children() - before
        assert len(killed) == 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        for each in asked:
            with pytest.raises(aiohttp.ClientError):
                await each
        await until(lambda: not requests and not engines["decode"].num_in_flight)
        world.decode.script = None
        # Others take the connections that come meanwhile.
        async with world.http.post(
            f"{world.url}/v1/completions", json={"prompt": "hi"}, headers=bearer("blue")
        ) as response:
            assert response.status == 200
        async with world.http.get(f"{world.url}/metrics", headers=bearer("operator")) as response:
            lines = (await response.text()).splitlines()
        assert "prfaas_gateway_workers_ended_total 2.0" in lines
        assert "prfaas_requests_in_flight 0.0" in lines
        assert killed.isdisjoint(children())
    assert children() <= before


@asynccontextmanager
async def lonely(
    checkpoint: Path, identities: Path, state: Path, engine: ScriptedEngine
) -> AsyncIterator[tuple[str, Decider]]:
    """A worker in this process, whose decider is the test."""
    deployment = deployment_for(checkpoint, identities, state)
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    start = Start(deployment, theirs.detach(), LogFormat.TEXT, 20, 0.01, 0.2)
    decider = Decider(engine)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: decider.channel, sock=ours)
    worker = asyncio.create_task(Worker(start).run(state, [listener.detach()]))
    await decider.ready.wait()
    decider.channel.send(messages.PromptFacts(4096))
    try:
        yield url, decider
    finally:
        decider.channel.close()
        await worker


class Decider:
    """A decider that answers as long as it is told to, and sends requests to one engine."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.channel = messages.WorkerChannel(messages.OfWorker, self)
        self.ready = asyncio.Event()
        self.is_well = True
        self.refused: dict[str, str] = {}
        """Headers of the refusal of all requests."""
        self.num_asked = 0
        self._engine = engine

    def take(self, message: Any) -> None:
        match message:
            case messages.Ready():
                self.ready.set()
            case messages.Beat() if self.is_well:
                self.channel.send(messages.Answered())
            case messages.Ask() if self.refused:
                self.num_asked += 1
                self.channel.send(messages.Reply(message.number, 429, self.refused, b"{}"))
            case messages.Ask() if self.is_well:
                url = self._engine.url
                self.channel.send(
                    messages.Leg(
                        message.number, "decode", url, None, 4096, {}, {}, None, False, None, None
                    )
                )
            case messages.LegEnded():
                self.channel.send(messages.Open(message.number, {}))

    def lost(self) -> None:
        pass


async def test_a_decider_that_hangs_or_dies(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """A request at an engine is served to its end; one that comes is answered with 503 at once."""
    engine = ScriptedEngine("decode")
    await engine.start()
    body = {"prompt": "hi"}
    async with (
        aiohttp.ClientSession() as http,
        lonely(checkpoint, identities, tmp_path / "state", engine) as (url, decider),
    ):
        async with http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["text"] == "Hello there!"
        decider.is_well = False
        async with http.post(f"{url}/v1/completions", json=body) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        async with http.get(f"{url}/health") as response:
            assert response.status == 503
        decider.is_well = True
        decider.channel.send(messages.Answered())
        held = asyncio.Event()

        async def slow(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
            engine.hanging.set()
            await held.wait()
            return await engine.answer(request, body)

        engine.script = slow
        asked = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
        await engine.hanging.wait()
        decider.channel.close()
        held.set()
        async with await asked as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["text"] == "Hello there!"
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(f"{url}/health")
    await engine.stop()


async def test_a_tenant_that_has_used_up_its_limit_is_not_tokenised_for(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """The decider refuses it; here nobody takes what is handed on."""
    engine, body, asked = ScriptedEngine("decode"), {"prompt": "hi"}, []
    async with (
        aiohttp.ClientSession() as http,
        lonely(checkpoint, identities, tmp_path / "state", engine) as (url, decider),
    ):
        for reason in ("requests_in_flight", "gateway_full", "tokens_per_minute", "unasked"):
            decider.refused = {REASON_HEADER: reason, "Retry-After": "3600"}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                asked.append((response.status, decider.num_asked))
    assert asked == [(429, 1), (429, 2), (429, 3), (503, 3)]
