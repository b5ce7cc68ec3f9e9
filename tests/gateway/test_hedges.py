"""Remote paths that are late by the predictions of a plan: left in time, and only then."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.resilience.budgets import Budget, BudgetSettings
from tests.plans import plan_file

from .conftest import World, until
from .long_requests import both_pools_heard_the_abort
from .plan_tables import routing
from .prompts import LONG
from .scripted_engine import ScriptedEngine, hang

BODY = {"prompt": LONG, "max_tokens": 3}
LATE = 'prfaas_fallback_total{reason="late",stage="%s"}'


@pytest.mark.parametrize("extra", [{}, {"ttft_max": "20s"}])
async def test_a_prefill_that_does_not_end_is_left(
    checkpoint: Path, identities: Path, tmp_path: Path, extra: dict[str, Any]
) -> None:
    """Predicted to take some 30 ms, and at home three times as long; the timeout is a minute."""
    plan = str(plan_file(tmp_path, local_s=0.03, remote_s=0.01))
    async with routing(checkpoint, identities, tmp_path, plan=plan, **extra) as world:
        world.prefill.script = hang
        assert (await world.post(BODY))[0] == 200
        record = await world.record()
        assert (record["path"], record["fallback"]) == (
            "remote",
            {"stage": "prefill", "reason": "late"},
        )
        await world.prefill.gone.wait()
        await both_pools_heard_the_abort(world)
        assert await world.metric(LATE % "prefill") == 1
        assert "kv_transfer_params" not in world.decode.calls[0].body


async def test_blocks_that_do_not_come_are_given_up_while_decode_waits(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = str(plan_file(tmp_path, local_s=0.03, remote_s=0.01))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:

        async def waits(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
            """As an engine whose tier asks its pool until the transfer has ended."""
            assert body["kv_transfer_params"]["prfaas"]["transfer"]
            await until(lambda: bool(world.pd_pool.aborts))
            return await engine.answer(request, body)

        world.decode.script = waits
        status, reply = await world.post(BODY)
        assert (status, reply["choices"][0]["text"]) == (200, "Hello there!")
        assert (await world.record())["fallback"] == {"stage": "transfer", "reason": "late"}
        assert await world.metric(LATE % "transfer") == 1
        assert world.gateway.driver.dispatcher.promised_bytes == 0


async def test_a_request_that_is_over_is_not_kept_by_its_transfer(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Views of transfers are remembered by the thousand, prompts must not be."""
    plan = str(plan_file(tmp_path))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:

        async def arrive(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
            world.pd_pool.end_transfer(body["kv_transfer_params"]["prfaas"]["transfer"])
            return await engine.answer(request, body)

        world.decode.script, world.decode.cached_tokens = arrive, 320
        assert (await world.post(BODY))[0] == 200
        [view] = world.gateway.transfers._views.values()
        # Its report is a module's function again, no method of the request's.
        await until(lambda: not isinstance(view.report, partial))


async def test_a_clients_own_deadline_leaves_a_path_that_would_miss_it(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Predicted to take 48 s away, which was known before, and 13 s at home."""
    limits = {
        "plan": str(plan_file(tmp_path, local_s=8.0, remote_s=30.0)),
        "policy": "paper",
        "prefill_timeout": "300s",
    }
    async with routing(checkpoint, identities, tmp_path, **limits) as world:
        world.prefill.script = hang
        headers = {"X-Request-Timeout": "30"}
        async with world.http.post(
            f"{world.url}/v1/completions", json=BODY, headers=headers
        ) as response:
            assert response.status == 200
        record = await world.record()
        assert record["fallback"] == {"stage": "prefill", "reason": "late"}
        assert record["predicted_local_ms"] < 30_000 < record["predicted_remote_ms"]
        # It was left for its deadline, long before the prediction was missed.
        assert record["prefill_ms"] < record["predicted_remote_ms"] / 2


async def test_over_budget_and_without_a_plan_only_the_timeout_leaves(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = str(plan_file(tmp_path, local_s=0.03, remote_s=0.01))
    limits = {"prefill_timeout": "1s", "plan": plan}
    async with routing(checkpoint, identities, tmp_path, **limits) as world:
        world.gateway.fleet.hedges = Budget(BudgetSettings(0, 0, 0))
        await timed_out(world)
    limits = {"prefill_timeout": "1s"}
    async with routing(checkpoint, identities, tmp_path / "other", **limits) as world:
        await timed_out(world)


async def timed_out(world: World) -> None:
    world.prefill.script = hang
    assert (await world.post(BODY))[0] == 200
    assert (await world.record())["fallback"] == {"stage": "prefill", "reason": "timeout"}
