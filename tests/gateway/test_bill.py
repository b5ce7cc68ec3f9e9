"""The bill of a gateway: its records are its counters, at the prices of their time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prfaas.audit.reading import logs_of, records, verify
from prfaas.cli.main import cli
from prfaas.config.deployment import Deployment
from tests.gateway.tenant_keys import HASHES, bearer
from tests.plans import plan_file

from .conftest import World, annexes_of, deployment_for, running, until
from .prompts import LONG


def tables(tmp_path: Path) -> dict[str, Any]:
    tenants: dict[str, Any] = {
        "red": {"keys": [HASHES["red"]], "service_tier": "gold"},
        "blue": {"keys": [HASHES["blue"]]},
    }
    prices = {
        "prfaas": {"gpu_hour": 2.0, "per_tb": 3.0},
        "pd": {"gpu_hour": 9.0, "gb_hour": 0.5, "watts": 700.0},
    }
    return {
        "audit": {"folder": str(tmp_path / "audit")},
        "routing": {"plan": str(plan_file(tmp_path))},
        "classes": {"gold": {"priority": 1}},
        "tenants": tenants,
        "prices": prices,
        "gateway": {"operator_keys": [HASHES["operator"]]},
    }


async def ask(world: World, tenant: str, prompt: str, **more: object) -> int:
    """Output tokens of a request."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}
    headers = bearer(tenant)
    async with world.http.post(f"{world.url}/v1/completions", json=body, headers=headers) as got:
        assert got.status == 200
        answer = await got.json()
    num_tokens: int = answer["usage"]["completion_tokens"]
    return num_tokens


def billed(tmp_path: Path, *words: str) -> dict[str, Any]:
    command = ["bill", str(tmp_path / "audit"), "--format", "json", *words]
    found = CliRunner().invoke(cli, command)
    assert found.exit_code == 0, found.output
    answer: dict[str, Any] = json.loads(found.output)
    return answer


def counted(world: World, name: str, **labels: str) -> float:
    """Sum of a counter over the samples that have these labels."""
    return sum(
        sample.value
        for metric in world.gateway.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_the_bill_is_the_counters_over_a_price_change_a_failure_and_a_restart(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    num_output, cost, operations, tokens, engine_s = 0, 0.0, 0.0, 0.0, 0.0
    for number in range(2):
        async with running(checkpoint, identities, tmp_path / "state", **tables(tmp_path)) as world:
            await until(lambda: world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
            num_output += await ask(world, "red", f"{number} {LONG}")
            num_output += await ask(world, "blue", "a short prompt")
            headers = bearer("operator")
            url = f"{world.url}/control/prices/prfaas"
            async with world.http.post(url, json={"gpu_hour": 5.0}, headers=headers) as got:
                assert got.status == 200
            annexes_of(world).meter.beat(time.monotonic_ns())
            world.prefill.healthy = False
            num_output += await ask(world, "blue", f"{number} again {LONG}")
        market = world.gateway.driver.dispatcher.market
        assert market is not None
        cost += sum(market.gpu_cost.values())
        operations += counted(world, "prfaas_usage_operations_total")
        tokens += counted(world, "prfaas_usage_tokens_total")
        engine_s += counted(world, "prfaas_usage_engine_seconds_total")

    rows = billed(tmp_path, "--by", "phase")["rows"]
    by_phase = {row["phase"]: row for row in rows}
    assert by_phase["decode"]["tokens"] == num_output
    assert by_phase["decode"]["count"] == 6
    assert by_phase["decode"]["slot_ns"] > 0
    prefills = [row for phase, row in by_phase.items() if phase.startswith("prefill")]
    assert sum(float(row["cost"]) for row in prefills) == pytest.approx(cost, abs=2e-6)
    total = billed(tmp_path)["total"]
    assert (total["count"], total["tokens"]) == (operations, tokens)
    assert total["engine_ns"] / 1e9 == pytest.approx(engine_s, rel=1e-9)
    assert total["unpriced_records"] == 0

    keys = {
        (row["tenant"], row["phase"], row["cluster"], row["class"])
        for row in billed(tmp_path)["rows"]
    }
    assert {
        ("red", "prefill_remote", "prfaas", "gold"),
        ("red", "decode", "pd", "gold"),
        ("blue", "prefill_local", "pd", ""),
    } <= keys
    assert verify(tmp_path / "audit", "gateway", logs_of(tmp_path / "audit")["gateway"]).is_intact


async def test_a_ticket_has_the_class_of_its_request(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(checkpoint, identities, tmp_path / "state", **tables(tmp_path)) as world:
        await until(lambda: world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
        await ask(world, "red", LONG)
    lines = records(logs_of(tmp_path / "audit")["gateway"])
    (ticket,) = [line.fields for line in lines if line.kind == "ticket"]
    assert (ticket["tenant_name"], ticket["class"]) == ("red", "gold")


def test_periods_that_follow_each_other_add_up(tmp_path: Path) -> None:
    words = ("--from", "2026-11-23", "--to", "2026-11-22")
    found = CliRunner().invoke(cli, ["bill", str(tmp_path), *words])
    assert found.exit_code != 0
    assert "is not before" in str(found.exception)


def test_a_price_of_storage_or_a_power_below_zero_is_refused(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    def made(**pd: float) -> Deployment:
        prices = {"pd": pd}
        routing = {"plan": str(plan_file(tmp_path))}
        return deployment_for(checkpoint, identities, tmp_path, routing=routing, prices=prices)

    assert made(gb_hour=0.5, watts=700.0).prices["pd"].watts == 700
    for name in ("gb_hour", "watts"):
        with pytest.raises(ValueError, match=rf"prices\.pd\.{name}"):
            made(**{name: -1.0})
