"""A client that leaves takes its legs and its transfer along."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import World, until
from .scripted_engine import Script, hang, stream_then_hang
from .test_fallbacks import both_pools_heard_the_abort
from .test_paths import LONG


async def test_during_prefill(world: World) -> None:
    world.prefill.script = hang
    request = asyncio.create_task(world.post({"prompt": LONG}))
    await world.prefill.hanging.wait()
    await leave(request)
    await world.prefill.gone.wait()
    await cancelled(world)
    assert not world.decode.calls


@pytest.mark.parametrize(("script", "stream"), [(hang, False), (stream_then_hang(2), True)])
async def test_during_decode(world: World, script: Script, stream: bool) -> None:
    world.decode.script = script
    request = asyncio.create_task(world.post({"prompt": LONG, "stream": stream}))
    await world.decode.hanging.wait()
    await leave(request)
    await world.decode.gone.wait()
    await cancelled(world)


async def leave(request: asyncio.Task[object]) -> None:
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def cancelled(world: World) -> None:
    await both_pools_heard_the_abort(world)
    await until(lambda: world.gateway.records.latest(1)[0].outcome == "cancelled")
    assert await world.metric('prfaas_requests_total{outcome="cancelled",path="remote"}') == 1
    assert await world.metric("prfaas_requests_in_flight") == 0
    assert all(engine.num_in_flight == 0 for engine in world.gateway.engines.by_name.values())
