"""Every way in which a leg or a transfer fails; the client gets its answer all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.transfer.transfer_state import TransferEnd
from tests.gateway.long_requests import BODY, both_pools_heard_the_abort

from .conftest import World, running, until
from .scripted_engine import (
    Script,
    ScriptedEngine,
    die_after,
    drop,
    error_in_stream,
    hang,
    refuse,
)

HELD = 320
"""Tokens of the prompt that are handed over: up to the last checkpoint."""


async def answered(world: World, stage: str, reason: str) -> dict[str, Any]:
    """Send a long prompt, expect the full answer and one counted fallback."""
    status, reply = await world.post(BODY)
    assert status == 200
    assert reply["choices"][0]["text"] == "Hello there!"
    record = await world.record()
    assert record["path"] == "remote"
    assert record["fallback"] == {"stage": stage, "reason": reason}
    if stage == "prefill":
        assert record["prefilled_by"] == record["decode_engine"]
    assert await world.metric(f'prfaas_fallback_total{{reason="{reason}",stage="{stage}"}}') == 1
    return record


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (drop, "unreachable"),
        (refuse(500), "status_5xx"),
        (refuse(400), "status_4xx"),
        (refuse(999), "status_5xx"),
    ],
)
async def test_prefill_leg_fails(world: World, script: Script, reason: str) -> None:
    world.prefill.script = script
    await answered(world, "prefill", reason)
    await both_pools_heard_the_abort(world)
    assert "kv_transfer_params" not in world.decode.calls[0].body


async def test_prefill_answer_is_no_json(world: World) -> None:
    from aiohttp import web

    async def garbage(*_: object) -> web.StreamResponse:
        return web.Response(text="<html>")

    world.prefill.script = garbage
    await answered(world, "prefill", "bad_answer")


async def test_prefill_engine_dies_unnoticed(world: World) -> None:
    """The first request notices, and the engine counts as down from then on."""
    probes = world.gateway.engines.probes._tasks.values()
    for looking in probes:
        looking.cancel()
    await asyncio.wait(probes)
    await world.prefill.stop()
    engine = world.gateway.engines.by_name["prefill"]
    engine.is_ready = True
    await answered(world, "prefill", "unreachable")
    assert not engine.is_ready


async def test_prefill_takes_too_long(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    routing = {"prefill_timeout": "500ms"}
    async with running(checkpoint, identities, tmp_path, routing=routing) as world:
        world.prefill.script = hang
        await answered(world, "prefill", "timeout")
        await world.prefill.gone.wait()
        await both_pools_heard_the_abort(world)


@pytest.mark.parametrize("which", ["prfaas_pool", "pd_pool"])
async def test_pool_is_lost_during_prefill(world: World, which: str) -> None:
    world.prefill.script = hang
    request = asyncio.create_task(answered(world, "transfer", "pool_down"))
    await world.prefill.hanging.wait()
    getattr(world, which).disconnect()
    await request
    await world.prefill.gone.wait()


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        (end, "prefill" if end is TransferEnd.ENGINE_LOST else "transfer")
        for end in TransferEnd
        if end is not TransferEnd.COMMITTED
    ],
)
async def test_transfer_ends_during_prefill(world: World, kind: TransferEnd, stage: str) -> None:
    """Free text of a pool decides nothing."""
    world.prefill.script = hang
    request = asyncio.create_task(answered(world, stage, kind))
    await world.prefill.hanging.wait()
    transfer = world.prefill.calls[0].body["kv_transfer_params"]["prfaas"]["transfer"]
    world.pd_pool.end_transfer(transfer, kind, "the link of a pool: no_room, missing digest")
    await request
    await world.prefill.gone.wait()


async def test_a_commit_does_not_end_the_prefill_leg(world: World) -> None:
    release = asyncio.Event()

    async def slow(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
        engine.hanging.set()
        await release.wait()
        return await engine.answer(request, body)

    world.prefill.script, world.decode.cached_tokens = slow, 320
    request = asyncio.create_task(world.post(BODY))
    await world.prefill.hanging.wait()
    transfer = world.prefill.calls[0].body["kv_transfer_params"]["prfaas"]["transfer"]
    world.prfaas_pool.end_transfer(transfer)
    view = world.gateway.transfers._views[bytes.fromhex(transfer)]
    await until(lambda: "prfaas-pool" in view.ended)
    release.set()
    assert (await request)[0] == 200
    assert (await world.record())["fallback"] is None


async def test_a_commit_with_all_blocks_ends_a_prefill_leg_that_is_not_answered(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a firewall that has forgotten the silent connection of the leg."""
    world.prefill.script, world.decode.cached_tokens = hang, 320
    request = asyncio.create_task(world.post(BODY))
    await world.prefill.hanging.wait()
    transfer = world.prefill.calls[0].body["kv_transfer_params"]["prfaas"]["transfer"]
    world.pd_pool.end_transfer(transfer, num_bytes=HELD // 16 * 1024 + 2048)
    assert (await request)[0] == 200
    await world.prefill.gone.wait()
    record = await world.record()
    assert (record["path"], record["fallback"]) == ("remote", None)
    assert world.decode.calls[0].body["kv_transfer_params"]["prfaas"]["transfer"] == transfer
    assert "prefill_unanswered" in caplog.text


async def test_decode_finds_less_than_was_sent(world: World) -> None:
    """The prefill leg went well, but the blocks did not get there in time."""
    world.decode.cached_tokens = 256
    await answered(world, "transfer", "timeout")
    await both_pools_heard_the_abort(world)


async def test_decode_finds_less_although_all_was_sent(world: World) -> None:
    async def commit_then_answer(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
        transfer = body["kv_transfer_params"]["prfaas"]["transfer"]
        world.pd_pool.end_transfer(transfer)
        view = world.gateway.transfers._views[bytes.fromhex(transfer)]
        await until(lambda: "pd-pool" in view.ended)
        return await engine.answer(request, body)

    world.decode.script = commit_then_answer
    await answered(world, "transfer", "unknown")
    assert not world.pd_pool.aborts


async def test_decode_finds_less_and_the_pool_says_why(world: World) -> None:
    async def abort_then_answer(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
        transfer = body["kv_transfer_params"]["prfaas"]["transfer"]
        world.pd_pool.end_transfer(transfer, "link_lost", num_bytes=10)
        view = world.gateway.transfers._views[bytes.fromhex(transfer)]
        await until(lambda: "pd-pool" in view.ended)
        return await engine.answer(request, body)

    world.decode.script = abort_then_answer
    await answered(world, "transfer", "link_lost")


async def test_decode_engine_dies_and_another_takes_over(world: World) -> None:
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    world.decode.script = drop
    await answered(world, "decode", "unreachable")
    [call] = world.spare.calls
    assert "kv_transfer_params" not in call.body
    assert (await world.record())["decode_engine"] == "spare"


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_engine_dies_before_the_first_byte(world: World, stream: bool) -> None:
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    world.decode.script = die_after(0) if stream else drop
    async with world.http.post(
        f"{world.url}/v1/completions", json={"prompt": "hi", "stream": stream}
    ) as response:
        assert response.status == 200
        assert "there" in await response.text()


async def test_the_only_decode_engine_dies(world: World) -> None:
    world.decode.script = drop
    async with world.http.post(f"{world.url}/v1/completions", json={"prompt": "hi"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["type"] == "ServiceUnavailableError"
    assert (await world.record())["outcome"] == "failed"


@pytest.mark.parametrize("script", [die_after(2), error_in_stream])
async def test_decode_fails_within_the_stream(world: World, script: Script) -> None:
    world.decode.script = script
    async with world.http.post(
        f"{world.url}/v1/completions", json=BODY | {"stream": True}
    ) as response:
        assert response.status == 200
        events = (await response.text()).split("\n\n")
    assert '"error"' in events[-3]
    assert events[-2:] == ["data: [DONE]", ""]
    assert (await world.record())["outcome"] == "failed"
    await both_pools_heard_the_abort(world)


async def test_an_engines_refusal_is_relayed_as_it_is(world: World) -> None:
    world.decode.script = refuse(400, "temperature is too hot")
    status, reply = await world.post({"prompt": "hi"})
    assert status == 400
    assert reply == {
        "error": {
            "message": "temperature is too hot",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
    }
    assert (await world.record())["outcome"] == "rejected"


async def test_the_whole_request_takes_too_long(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    gateway = {"request_timeout": "100ms"}
    async with running(checkpoint, identities, tmp_path, gateway=gateway) as world:
        world.decode.script = hang
        status, reply = await world.post(BODY)
        assert (status, reply["error"]["type"]) == (504, "GatewayTimeoutError")
        await world.decode.gone.wait()
        await both_pools_heard_the_abort(world)


async def test_after_recovery_requests_are_offloaded_again(world: World) -> None:
    world.decode.cached_tokens = 320
    await world.prefill.stop()
    await world.prfaas_pool.stop()
    await until(lambda: not world.gateway.pools.is_live("prfaas-pool"))
    assert (await world.post(BODY))[0] == 200
    assert (await world.record())["path"] == "local"
    port = int(world.prefill.url.rpartition(":")[2])
    await world.prefill.start(port)
    await world.prfaas_pool.start()
    await until(lambda: world.gateway.engines.by_name["prefill"].is_ready)
    await until(lambda: world.gateway.pools.layout("prfaas-pool", "prefill") is not None)
    assert (await world.post(BODY))[0] == 200
    record = await world.record()
    assert (record["path"], record["fallback"]) == ("remote", None)
