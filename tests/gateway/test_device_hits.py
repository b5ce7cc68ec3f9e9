"""Hits in device memory decide while the events of the engine arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.plans import plan_file

from .conftest import World, running, until
from .kv_publisher import Publisher, removed, stored
from .purge_scripts import script

IDS = list(range(300))
HELD = 256


Site = tuple[World, Publisher]


@asynccontextmanager
async def holding(
    engine: str, checkpoint: Path, identities: Path, directory: Path
) -> AsyncIterator[Site]:
    """A world in which one engine holds nearly all of a prompt that no pool has."""
    places = {"kv_events": f"ipc://{directory}/e", "kv_events_replay": f"ipc://{directory}/r"}
    publisher = Publisher(places["kv_events"], places["kv_events_replay"])
    tables: dict[str, Any] = {"routing": {"plan": str(plan_file(directory)), "policy": "paper"}}
    tables |= {"remote": places} if engine == "prefill" else {"engines": {engine: places}}
    try:
        async with running(checkpoint, identities, directory / "state", **tables) as world:
            hashes = world.hashes(IDS)
            publisher.publish(stored(hashes[: HELD // 16]), stored([hashes[HELD // 16 - 1]], 1))
            await until(lambda: world.gateway.index.num_blocks(engine) == HELD // 16 + 1)
            yield world, publisher
    finally:
        await publisher.close()


@pytest.fixture
async def site(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[Site]:
    async with holding("decode", checkpoint, identities, tmp_path) as found:
        yield found


async def path(world: World) -> str:
    body = {"prompt": IDS, "max_tokens": 2}
    assert (await world.post(body))[0] == 200
    return str((await world.record())["path"])


async def test_what_its_engine_holds_keeps_a_prompt_at_home(site: Site) -> None:
    world, engine = site
    assert await path(world) == "local"
    record = await world.record()
    assert (record["reason"], record["pd_hit_tokens"]) == ("below_threshold", HELD)
    assert not world.prefill.calls
    engine.publish(removed(world.hashes(IDS)[:1]))
    await until(lambda: world.gateway.index.num_blocks("decode") == HELD // 16)
    assert await path(world) == "remote"
    assert (await world.record())["pd_hit_tokens"] == 0


async def test_what_is_not_heard_any_more_does_not_count(site: Site) -> None:
    world, engine = site
    known = (await world.post({"prompt": IDS}, "/kv/lookup"))[1]["decision"]
    assert (known["path"], known["num_new_tokens"]) == ("local", len(IDS) - HELD)
    await engine.close()
    await until(lambda: world.gateway.index.state("decode") == "degraded")
    unknown = (await world.post({"prompt": IDS}, "/kv/lookup"))[1]["decision"]
    assert (unknown["path"], unknown["num_new_tokens"]) == ("remote", len(IDS))
    assert known["predicted_local_ms"] < unknown["predicted_local_ms"]
    assert await path(world) == "remote"


async def test_what_an_engine_away_holds_is_predicted_and_shipped_all_the_same(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with holding("prefill", checkpoint, identities, tmp_path) as (world, engine):
        assert await path(world) == "remote"
        known = await world.record()
        assert (known["pd_hit_tokens"], known["prfaas_hit_tokens"]) == (0, HELD)
        engine.publish(removed(world.hashes(IDS)[:1]))
        await until(lambda: world.gateway.index.num_blocks("prefill") == HELD // 16)
        assert await path(world) == "remote"
        unknown = await world.record()
        assert (unknown["pd_hit_tokens"], unknown["prfaas_hit_tokens"]) == (0, 0)
        predicted = [
            (await explained(world, record))["decision"]["predicted_remote_ms"]
            for record in (known, unknown)
        ]
        assert predicted[0] < predicted[1]
        orders = [call.body["kv_transfer_params"]["prfaas"] for call in world.prefill.calls]
        assert len({(order["have_tokens"], order["final_tokens"]) for order in orders}) == 1


async def explained(world: World, record: dict[str, Any]) -> dict[str, Any]:
    url = f"{world.url}/control/requests/{record['request_id']}/explanation"
    async with world.http.get(url) as response:
        found: dict[str, Any] = await response.json()
        return found


async def test_what_an_idle_engine_was_told_to_forget_does_not_count(site: Site) -> None:
    """vLLM reports with its next step that its cache was cleared; until then nobody is misled."""
    world, engine = site
    script(world)
    assert (await world.post({"source": "prfaas-pool"}, "/control/purge"))[0] == 200
    assert world.gateway.index.num_blocks("decode") == 0
    assert await path(world) == "remote"
    engine.publish(stored(world.hashes(IDS)[: HELD // 16]))
    await until(lambda: world.gateway.index.num_blocks("decode") == HELD // 16)
    assert world.gateway.index.state("decode") == "exact"
