"""Prices in a gateway: the price file, `ctl price`, `explain` and metrics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.gateway.conftest import World, annexes_of, running, until
from tests.gateway.ctl_runner import run
from tests.gateway.prompts import LONG
from tests.plans import plan_file

REMOTE = "[prices.prfaas]\ngpu_hour = 0.001\n[prices.pd]\ngpu_hour = 9.0\n"
LOCAL = "[prices.prfaas]\ngpu_hour = 9.0\n[prices.pd]\ngpu_hour = 0.001\n"


async def control(world: World, path: str, **body: object) -> tuple[int, dict[str, Any]]:
    return await world.post(body, f"/control/{path}")


async def view(world: World, path: str) -> dict[str, Any]:
    async with world.http.get(f"{world.url}/control/{path}") as response:
        found: dict[str, Any] = await response.json()
        return found


async def sent(world: World, prompt: str) -> dict[str, Any]:
    status, _ = await world.post({"prompt": prompt, "max_tokens": 2})
    assert status == 200
    return await world.record()


def table(tmp_path: Path, **more: Any) -> dict[str, Any]:
    prices = tmp_path / "prices.toml"
    prices.write_text(REMOTE)
    plan = str(plan_file(tmp_path))
    return {"plan": plan, "policy": "cost", "second_price": 1e-6, "price_file": str(prices)} | more


def write(routing: dict[str, Any], text: str) -> None:
    Path(routing["price_file"]).write_text(text)


async def connected(world: World) -> None:
    await until(lambda: world.gateway.pools.link_up("prfaas-pool", "pd-pool"))


async def test_a_changed_price_file_moves_the_next_request(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    routing = table(tmp_path)
    async with running(checkpoint, identities, tmp_path / "state", routing=routing) as world:
        await connected(world)
        assert (await sent(world, LONG))["reason"] == "cheapest_remote"
        clock = annexes_of(world).prices
        assert clock is not None
        write(routing, "[prices.prfaas]\ngpu_hour = -1.0\n")
        clock.beat(time.monotonic_ns())
        assert "prices.prfaas.gpu_hour" in clock.fault
        assert (await sent(world, LONG))["reason"] == "cheapest_remote"
        write(routing, LOCAL)
        clock.beat(time.monotonic_ns())
        assert not clock.fault
        assert (await sent(world, LONG))["reason"] == "cheapest_local"
        entries = (await view(world, "decisions"))["decisions"]
        actions = [entry["action"] for entry in entries if entry["loop"] == "prices"]
        assert actions[:2] == ["read", "kept"]


async def test_an_operator_sets_prices_and_announces_what_leaves(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    routing = table(tmp_path, price_file=None)
    async with running(checkpoint, identities, tmp_path / "state", routing=routing) as world:
        await connected(world)
        for cluster, price in (("prfaas", "0.001"), ("pd", "9")):
            found = await run("price", cluster, "--gpu-hour", price, url=world.url)
            assert found.exit_code == 0, found.output
        record = await sent(world, LONG)
        assert record["reason"] == "cheapest_remote"
        shown = (await run("explain", record["request_id"], url=world.url)).output
        assert "cost      *prfaas" in shown
        assert "cost       pd  " in shown
        left = await run("price", "prfaas", "--leaves-in", "0", url=world.url)
        assert "revoked" in left.output
        record = await sent(world, LONG)
        assert (record["path"], record["reason"]) == ("local", "none_feasible")
        explained = await view(world, f"requests/{record['request_id']}/explanation")
        by_name = {each["cluster"]: each for each in explained["costs"]}
        assert by_name["prfaas"]["excluded"] == "revoked"
        assert by_name["pd"]["is_chosen"]
        assert "price      prfaas" in (await run("status", url=world.url)).output
        assert (await run("price", "prfaas", "--stays", url=world.url)).exit_code == 0
        assert (await sent(world, LONG))["reason"] == "cheapest_remote"
        assert await world.metric('prfaas_priced_prefills_total{cluster="prfaas"}') == 2
        assert await world.metric('prfaas_priced_prefills_total{cluster="pd"}') == 1
        cost = await world.metric('prfaas_prefill_cost_total{cluster="pd",part="compute"}')
        assert cost > 0
        assert await world.metric('prfaas_gpu_hour_price{cluster="pd"}') == 9


async def test_wrong_prices_change_nothing(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    routing = table(tmp_path)
    async with running(checkpoint, identities, tmp_path / "state", routing=routing) as world:
        assert (await control(world, "prices/prfaas", gpu_hour=-1.0))[0] == 400
        assert (await control(world, "prices/moon", gpu_hour=1.0))[0] == 404
        assert (await control(world, "prices/prfaas", leaves_in_s=1.0, stays=True))[0] == 400
        prices = {
            each["cluster"]: each["gpu_hour"] for each in (await view(world, "status"))["prices"]
        }
        assert prices == {"pd": 9.0, "prfaas": 0.001}


async def test_without_prices_there_is_nothing_to_set(world: World) -> None:
    status, answer = await control(world, "prices/prfaas", gpu_hour=1.0)
    assert (status, "has no prices" in answer["error"]["message"]) == (409, True)
    assert (await view(world, "status"))["prices"] == []
