"""A PrfaaS engine that hangs, without a plan: its requests go on at home long before a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.core.resilience.budgets import Budget, BudgetSettings
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.routing.observed import PACE

from .conftest import World, running, until
from .prompts import LONG
from .scripted_engine import hang

BODY = {"prompt": LONG, "max_tokens": 3}


@pytest.fixture
async def hasty(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    """Health checks have 300 ms; a prefill has the default timeout, which no test waits for."""
    gateway = {"connect_timeout": "300ms"}
    async with running(checkpoint, identities, tmp_path / "state", gateway=gateway) as world:
        yield world


async def test_prefills_of_an_engine_that_stops_answering_are_left_at_once(hasty: World) -> None:
    hasty.prefill.script = hang
    posts = [asyncio.create_task(hasty.post(BODY)) for _ in range(5)]
    await until(lambda: len(hasty.prefill.calls) == 5)
    hasty.prefill.frozen.set()
    assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 5
    for index in range(5):
        record = await hasty.record(index)
        assert record["fallback"] == {"stage": "prefill", "reason": "unreachable"}
    assert not hasty.gateway.engines.by_name["prefill"].is_ready


async def learn(world: World) -> None:
    """Have enough prefills answered for a rate."""
    for number in range(PACE.num_min):
        assert (await world.post(BODY | {"prompt": f"{number}{LONG}"}))[0] == 200


async def test_an_engine_that_is_well_and_computes_nothing_is_left(world: World) -> None:
    """As when its workers hang and its API server does not; five of those open its breaker."""
    await learn(world)
    world.prefill.script = hang
    answers = await asyncio.gather(*(world.post(BODY) for _ in range(5)))
    assert [status for status, _ in answers] == [200] * 5
    record = await world.record()
    assert record["fallback"] == {"stage": "prefill", "reason": "stalled"}
    assert 2000 < record["prefill_ms"] < 30_000
    assert await world.metric('prfaas_fallback_total{reason="stalled",stage="prefill"}') == 5
    assert world.gateway.guards.breakers["prefill"].state is not BreakerState.CLOSED


async def test_over_budget_a_stalled_prefill_is_waited_for(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    limits = {"prefill_timeout": "4s"}
    async with running(checkpoint, identities, tmp_path / "state", routing=limits) as world:
        await learn(world)
        world.gateway.fleet.hedges = Budget(BudgetSettings(0, 0, 0))
        world.prefill.script = hang
        assert (await world.post(BODY))[0] == 200
        assert (await world.record())["fallback"] == {"stage": "prefill", "reason": "timeout"}
