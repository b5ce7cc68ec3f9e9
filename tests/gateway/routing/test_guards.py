"""Breakers in the gateway: whoever keeps failing gets no requests, and then a single one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from prfaas.core.resilience.budgets import Budget, BudgetSettings
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.resilience.quarantine import label_of
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.units import NS_PER_S
from tests.gateway.conftest import World, until
from tests.gateway.long_requests import BODY
from tests.gateway.scripted_engine import ScriptedEngine, drop, error_in_stream, refuse, send

LINK_LABEL = "link prfaas-pool:pd-pool"


class Clock:
    """The guards' time, which moves when a test says so."""

    def __init__(self, world: World) -> None:
        self.now_ns = 0
        guards = world.gateway.guards
        for name in ("began", "ended", "refresh"):
            setattr(guards, name, partial(self._call, getattr(guards, name)))

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        method(*arguments[:-1], self.now_ns)


def is_told(view: TransferView) -> bool:
    return "pd-pool" in view.ended


async def path_of_next(world: World) -> str:
    assert (await world.post(BODY))[0] == 200
    return str((await world.record())["path"])


async def state(world: World, target: str) -> str:
    [value] = [
        breaker.state.value
        for each, breaker in world.gateway.guards.breakers.items()
        if label_of(each) == target
    ]
    assert await world.metric(f'prfaas_breaker_state{{state="{value}",target="{target}"}}') == 1
    return value


async def test_a_failing_prefill_engine_is_left_alone_and_probed(world: World) -> None:
    clock, world.decode.cached_tokens = Clock(world), 320
    world.prefill.script = refuse(500)
    for _ in range(5):
        assert await path_of_next(world) == "remote"
    assert await state(world, "engine prefill") == "open"
    assert await path_of_next(world) == "local"
    assert (await world.record())["reason"] == "no_prefill_instance"
    assert len(world.prefill.calls) == 5
    clock.now_ns = NS_PER_S
    world.gateway.guards.refresh(0)
    assert await path_of_next(world) == "remote"
    assert await state(world, "engine prefill") == "open"
    world.prefill.script = None
    clock.now_ns = 3 * NS_PER_S
    world.gateway.guards.refresh(0)
    assert await path_of_next(world) == "remote"
    assert await state(world, "engine prefill") == "closed"
    assert await path_of_next(world) == "remote"
    sample = 'prfaas_loop_actions_total{action="open",loop="breaker"}'
    assert await world.metric(sample) == 2
    async with world.http.get(f"{world.url}/control/decisions") as response:
        [last, *_] = (await response.json())["decisions"]
    assert (last["what"], last["new"]) == ("engine prefill", "closed")


async def test_one_request_probes_and_the_others_stay_at_home(world: World) -> None:
    clock, release = Clock(world), asyncio.Event()
    world.prefill.script = refuse(500)
    for _ in range(5):
        await path_of_next(world)

    async def slow(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
        engine.hanging.set()
        await release.wait()
        return await engine.answer(request, body)

    world.prefill.script, world.decode.cached_tokens = slow, 320
    clock.now_ns = NS_PER_S
    world.gateway.guards.refresh(0)
    probe = asyncio.create_task(world.post(BODY))
    await world.prefill.hanging.wait()
    assert await path_of_next(world) == "local"
    release.set()
    assert (await probe)[0] == 200
    assert await path_of_next(world) == "remote"


async def test_a_link_that_loses_transfers_is_left_alone(world: World) -> None:
    clock = Clock(world)
    world.decode.cached_tokens = 320
    for outcome in (*["link_lost"] * 5, "committed"):
        if outcome == "committed":
            assert await state(world, LINK_LABEL) == "open"
            assert await path_of_next(world) == "local"
            assert (await world.record())["reason"] == "link_barred"
            clock.now_ns = NS_PER_S
            world.gateway.guards.refresh(0)
        assert await path_of_next(world) == "remote"
        transfer = world.prefill.calls[-1].body["kv_transfer_params"]["prfaas"]["transfer"]
        world.pd_pool.end_transfer(transfer, outcome)
        view = world.gateway.transfers._views[bytes.fromhex(transfer)]
        await until(partial(is_told, view))
    assert await state(world, LINK_LABEL) == "closed"
    assert await path_of_next(world) == "remote"


@pytest.mark.parametrize(
    ("kind", "opened"), [("peer_restarted", "open"), ("refused", "open"), ("aborted", "closed")]
)
async def test_a_fault_that_the_sending_pool_alone_reports_counts_against_the_link(
    world: World, kind: str, opened: str
) -> None:
    """A pool that restarts knows no transfers, and reports the end of none."""
    Clock(world)
    world.decode.cached_tokens = 320
    for _ in range(5):
        assert await path_of_next(world) == "remote"
        transfer = world.prefill.calls[-1].body["kv_transfer_params"]["prfaas"]["transfer"]
        world.prfaas_pool.end_transfer(transfer, kind)
        view = world.gateway.transfers._views[bytes.fromhex(transfer)]
        await until(partial(view.ended.__contains__, "prfaas-pool"))
    assert await state(world, LINK_LABEL) == opened


async def test_the_only_decode_engine_is_never_barred(world: World) -> None:
    world.decode.script = refuse(500)
    for _ in range(6):
        assert (await world.post({"prompt": "hi"}))[0] == 500
    assert await state(world, "engine decode") == "open"
    world.decode.script = None
    assert (await world.post({"prompt": "hi"}))[0] == 200


async def test_a_failing_decode_engine_is_barred_while_there_is_another(world: World) -> None:
    guards, engines = world.gateway.guards, world.gateway.engines.by_name
    Clock(world)
    world.decode.script = refuse(500)
    for _ in range(6):
        await world.post({"prompt": "hi"})
    world.spare.healthy = True
    await until(lambda: engines["spare"].is_ready)
    guards.refresh(0)
    assert not world.gateway.driver.states.takes("decode")
    assert (await world.post({"prompt": "hi"}))[0] == 200
    await world.spare.stop()
    await until(lambda: not engines["spare"].is_ready)
    assert world.gateway.driver.states.takes("decode")


@pytest.mark.parametrize("status", [400, 404])
async def test_what_a_client_does_wrong_counts_against_nobody(world: World, status: int) -> None:
    world.decode.script = refuse(status)
    for _ in range(6):
        assert (await world.post({"prompt": "hi"}))[0] == status
    assert await state(world, "engine decode") == "closed"


async def test_a_barred_engine_is_better_than_none(world: World) -> None:
    """The other one fails without going down."""
    Clock(world)
    world.decode.script = refuse(500)
    for _ in range(6):
        await world.post({"prompt": "hi"})
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    world.gateway.guards.refresh(0)
    assert not world.gateway.driver.states.takes("decode")
    world.decode.script, world.spare.script = None, refuse(500)
    assert (await world.post({"prompt": "hi"}))[0] == 200
    assert (await world.record())["decode_engine"] == "decode"


async def a_second_engine(world: World) -> None:
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)


async def error_at_once(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
    """vLLM's way to fail before the first token of a stream."""
    response = await engine.begin_stream(request)
    error = {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}
    await send(response, {"error": error})
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.mark.parametrize("body", [{"prompt": "hi"}, BODY, BODY | {"n": 2}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fails_everywhere_counts_against_nobody(
    world: World, body: dict[str, Any], stream: bool
) -> None:
    await a_second_engine(world)
    script = error_at_once if stream else refuse(500)
    world.prefill.script = refuse(500)
    world.decode.script = world.spare.script = script
    for _ in range(12):
        status, answer = await world.post(body | {"stream": stream})
        assert (status, answer["error"]["code"]) == (500, 500)
    for target in ("decode", "spare", "prefill"):
        assert await state(world, f"engine {target}") == "closed"
        assert world.gateway.guards.breakers[target]._in_a_row == 0
    world.prefill.script = world.decode.script = world.spare.script = None
    assert (await world.post({"prompt": "hi"}))[0] == 200


@pytest.mark.parametrize("script", [refuse(500), error_at_once, error_in_stream, drop])
async def test_who_fails_at_what_another_engine_serves_is_to_blame(
    world: World, script: Any
) -> None:
    await a_second_engine(world)
    world.decode.script = script
    breaker = world.gateway.guards.breakers["decode"]
    for _ in range(12):
        async with world.http.post(
            world.url + "/v1/completions", json={"prompt": "hi", "stream": True}
        ) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
            assert response.status == 200
        await until(lambda: world.gateway.engines.by_name["decode"].is_ready)
        if breaker.state is not BreakerState.CLOSED:
            break
    assert breaker.state is not BreakerState.CLOSED
    assert len(world.decode.calls) == 5
    assert world.gateway.guards.breakers["spare"].state is BreakerState.CLOSED


async def test_what_may_not_be_tried_elsewhere_tells_nothing(world: World) -> None:
    await a_second_engine(world)
    Clock(world)
    world.decode.script = world.spare.script = refuse(500)
    world.gateway.fleet.retries = Budget(BudgetSettings(ratio=0.0, per_s=1e-9, reserve=0.0))
    for _ in range(12):
        assert (await world.post({"prompt": "hi"}))[0] == 500
    assert await state(world, "engine decode") == "closed"
    world.decode.script = world.spare.script = refuse(503)
    for _ in range(12):
        assert (await world.post({"prompt": "hi"}))[0] == 503
    assert await state(world, "engine decode") == "open"
