"""Verification in a gateway: an altered transfer bars its source, and an operator lifts the bar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.audit.reading import logs_of, records
from tests.gateway.ctl_runner import run
from tests.gateway.tenant_keys import HASHES, bearer

from .conftest import World, annexes_of, running, until
from .prompts import LONG
from .purge_scripts import script


@pytest.fixture
async def verifying(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A gateway that verifies every transfer."""
    tables: dict[str, Any] = {
        "routing": {"verify_one_in": 1},
        "audit": {"folder": str(tmp_path / "audit")},
    }
    async with running(checkpoint, identities, tmp_path / "state", **tables) as made:
        await until(lambda: made.gateway.pools.link_up("prfaas-pool", "pd-pool"))
        yield made


async def shipped(world: World, **headers: str) -> None:
    """A long request whose blocks arrive."""
    body = {"prompt": LONG, "max_tokens": 2}
    async with world.http.post(f"{world.url}/v1/completions", json=body, headers=headers) as got:
        assert got.status == 200
        await got.read()
    call = [c for c in world.prefill.calls if "kv_transfer_params" in c.body][-1]
    world.pd_pool.end_transfer(call.body["kv_transfer_params"]["prfaas"]["transfer"])


def outcome(world: World, name: str) -> float:
    registry = world.gateway.metrics.registry
    return registry.get_sample_value("prfaas_verifications_total", {"outcome": name}) or 0


async def test_honest_blocks_change_nothing(verifying: World) -> None:
    verifying.pd_pool.worst = {"bfloat16": 1e-3}
    await shipped(verifying)
    await until(lambda: outcome(verifying, "equal") == 1)
    again = verifying.decode.calls[-1].body
    first = verifying.decode.calls[0].body
    assert again["prompt"] == verifying.prefill.calls[0].body["prompt"]
    assert again["max_tokens"] == 1
    assert again["cache_salt"] != first["cache_salt"]
    assert not verifying.gateway.driver.is_drained("prefill")


async def test_altered_blocks_bar_their_source_until_an_operator_resumes_it(
    verifying: World, tmp_path: Path
) -> None:
    told = script(verifying)
    verifying.pd_pool.worst = {"bfloat16": 0.9}
    await shipped(verifying)
    await until(lambda: outcome(verifying, "altered") == 1)
    await until(lambda: told.count(("pd-pool", "purge")) == 2)

    assert verifying.gateway.driver.is_drained("prefill")
    assert not verifying.gateway.driver.is_drained("decode")
    await verifying.post({"prompt": LONG, "max_tokens": 2})
    assert (await verifying.record())["path"] == "local"
    lines = records(logs_of(tmp_path / "audit")["gateway"])
    await until(lambda: not annexes_of(verifying).purging._tasks)
    resumed = await run("resume", "prefill", url=verifying.url)
    assert resumed.exit_code == 0, resumed.output
    await verifying.post({"prompt": LONG, "max_tokens": 2})
    assert (await verifying.record())["path"] == "remote"
    alarms = [line.fields for line in lines if line.kind == "alarm"]
    assert {(each["action"], each["what"]) for each in alarms} >= {("bar", "source prfaas-pool")}


async def test_blocks_that_the_operator_had_rounded_are_not_compared(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Rounding to four bits differs by more than an honest source may."""
    tables: dict[str, Any] = {
        "routing": {"verify_one_in": 1},
        "tenants": {
            "red": {"keys": [HASHES["red"]], "quality": "kivi4"},
            "blue": {"keys": [HASHES["blue"]]},
        },
    }
    async with running(checkpoint, identities, tmp_path / "state", **tables) as world:
        await until(lambda: world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
        world.pd_pool.worst = {"bfloat16": 1e-3}
        for tenant in ("red", "blue"):
            await shipped(world, **bearer(tenant))
        await until(lambda: outcome(world, "equal") + outcome(world, "skipped") == 2)
        assert outcome(world, "skipped") == 1
        assert len(world.pd_pool.compares) == 1


async def test_without_the_setting_nothing_is_computed_again(world: World) -> None:
    await until(lambda: world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
    await shipped(world)
    assert not annexes_of(world).verifier.is_on
    assert world.pd_pool.compares == []
