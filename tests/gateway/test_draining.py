"""A gateway that is told to stop: what is under way is served, new requests are sent elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.cli.parts.gateway_annexes import make_gateway, serve
from prfaas.config.addresses import Endpoints

from .conftest import World, deployment_for, running, until
from .prompts import LONG
from .scripted_engine import ScriptedEngine, send, stream_then_hang


async def slow(release: asyncio.Event, engine: ScriptedEngine, request: Any, body: Any) -> Any:
    """Streams a word, and the rest when it is let."""
    response = await engine.begin_stream(request)
    first, *rest = engine.chunks(body, chat=False)
    await send(response, first)
    engine.hanging.set()
    await release.wait()
    for chunk in rest:
        await send(response, chunk)
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_a_stream_under_way_is_served_to_its_end(world: World) -> None:
    release = asyncio.Event()
    world.decode.script = lambda *args: slow(release, *args)
    body = {"prompt": "hi", "stream": True}
    async with world.http.get(f"{world.url}/v1/models") as response:
        assert response.status == 200
    streaming = asyncio.create_task(world.http.post(f"{world.url}/v1/completions", json=body))
    await world.decode.hanging.wait()
    draining = asyncio.create_task(world.gateway.drain())
    await until(lambda: world.gateway.request_admission.is_closed)
    async with world.http.post(f"{world.url}/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert response.headers["Connection"] == "close"
        assert "about to stop" in (await response.json())["error"]["message"]
    async with world.http.get(f"{world.url}/health") as response:
        assert response.status == 503
        assert response.headers["Connection"] == "close"
    assert not draining.done()
    release.set()
    async with await streaming as response:
        text = await response.text()
    assert "there" in text
    assert text.endswith("data: [DONE]\n\n")
    await draining


async def test_a_remote_prefill_under_way_is_finished(world: World) -> None:
    release = asyncio.Event()

    async def late(engine: ScriptedEngine, request: Any, body: Any) -> Any:
        engine.hanging.set()
        await release.wait()
        return await engine.answer(request, body)

    world.prefill.script, world.decode.cached_tokens = late, 320
    asking = asyncio.create_task(world.post({"prompt": LONG}))
    await world.prefill.hanging.wait()
    draining = asyncio.create_task(world.gateway.drain())
    await until(lambda: world.gateway.request_admission.is_closed)
    release.set()
    assert (await asking)[0] == 200
    await draining
    assert world.gateway.records.latest(1)[0].fallback is None
    assert not world.prfaas_pool.aborts


async def test_what_takes_too_long_is_cut_off(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    gateway = {"drain_timeout": "50ms"}
    async with running(checkpoint, identities, tmp_path, gateway=gateway) as world:
        world.decode.script = stream_then_hang(2)
        body = {"prompt": "hi", "stream": True}
        asking = asyncio.create_task(world.http.post(f"{world.url}/v1/completions", json=body))
        await world.decode.hanging.wait()
        await world.gateway.drain()
        assert world.gateway.records.latest(1)[0].outcome == "running"
        async with await asking as response:
            response.close()
        await world.decode.gone.wait()


async def test_stopping_ends_by_draining(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    engine, release, stop = ScriptedEngine("decode"), asyncio.Event(), asyncio.Event()
    engine.script = lambda *args: slow(release, *args)
    await engine.start()
    nowhere = "http://127.0.0.1:9"
    endpoints = Endpoints(
        engines={"prefill": nowhere, "spare": nowhere, "decode": engine.url},
        pools=dict.fromkeys(("prfaas-pool", "pd-pool"), ("127.0.0.1", 9)),
    )
    deployment = deployment_for(checkpoint, identities, tmp_path)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(deployment, endpoints, stop, url.set_result))
    base = await url
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{base}/health") as response:
                if response.status == 200:
                    break
        body = {"prompt": "hi", "stream": True}
        asking = asyncio.create_task(http.post(f"{base}/v1/completions", json=body))
        await engine.hanging.wait()
        stop.set()
        # The port answers as long as somebody is served.
        while (await _status(http, base)) != 503:
            pass
        release.set()
        async with await asking as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        await serving
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{base}/health")
    await engine.stop()


async def _status(http: aiohttp.ClientSession, base: str) -> int:
    async with http.get(f"{base}/health") as response:
        return response.status


async def test_a_gateway_listens_once_it_knows_who_is_well(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Behind a load balancer the first request comes with the first connection."""
    engines = [ScriptedEngine(name) for name in ("prefill", "decode", "spare")]
    for engine in engines:
        await engine.start()
    await engines[2].stop()
    gateway = make_gateway(
        deployment_for(checkpoint, identities, tmp_path / "state"),
        Endpoints(
            engines={engine.name: engine.url for engine in engines},
            pools=dict.fromkeys(("prfaas-pool", "pd-pool"), ("127.0.0.1", 9)),
        ),
    )
    await gateway.start()
    ready = [engine.name for engine in gateway.engines.by_name.values() if engine.is_ready]
    await gateway.close()
    for engine in engines:
        await engine.stop()
    assert ready == ["prefill", "decode"]
