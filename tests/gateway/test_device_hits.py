"""What the engine at home holds in its own memory decides, for as long as its events are heard."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .conftest import World, running, until
from .kv_publisher import Publisher, removed, stored
from .test_policies import plan_file

IDS = list(range(300))
HELD = 256


@pytest.fixture
async def site(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> AsyncIterator[tuple[World, Publisher]]:
    """A world whose decode engine holds nearly all of a prompt that no pool has."""
    places = {"kv_events": f"ipc://{tmp_path}/e", "kv_events_replay": f"ipc://{tmp_path}/r"}
    publisher = Publisher(places["kv_events"], places["kv_events_replay"])
    routing = {"plan": str(plan_file(tmp_path)), "policy": "paper"}
    try:
        async with running(
            checkpoint,
            identities,
            tmp_path / "state",
            engines={"decode": places},
            routing=routing,
        ) as world:
            hashes = world.hashes(IDS)
            publisher.publish(stored(hashes[: HELD // 16]), stored([hashes[HELD // 16 - 1]], 1))
            await until(lambda: world.gateway.index.num_blocks("decode") == HELD // 16 + 1)
            yield world, publisher
    finally:
        await publisher.close()


async def path(world: World) -> str:
    body = {"prompt": IDS, "max_tokens": 2}
    assert (await world.post(body))[0] == 200
    return str((await world.record())["path"])


async def test_what_its_engine_holds_keeps_a_prompt_at_home(site: tuple[World, Publisher]) -> None:
    world, engine = site
    assert await path(world) == "local"
    record = await world.record()
    assert (record["reason"], record["pd_hit_tokens"]) == ("below_threshold", HELD)
    assert not world.prefill.calls
    engine.publish(removed(world.hashes(IDS)[:1]))
    await until(lambda: world.gateway.index.num_blocks("decode") == HELD // 16)
    assert await path(world) == "remote"
    assert (await world.record())["pd_hit_tokens"] == 0


async def test_what_is_not_heard_any_more_does_not_count(site: tuple[World, Publisher]) -> None:
    world, engine = site
    known = (await world.post({"prompt": IDS}, "/kv/lookup"))[1]["decision"]
    assert (known["path"], known["num_new_tokens"]) == ("local", len(IDS) - HELD)
    await engine.close()
    await until(lambda: world.gateway.index.state("decode") == "degraded")
    unknown = (await world.post({"prompt": IDS}, "/kv/lookup"))[1]["decision"]
    assert (unknown["path"], unknown["num_new_tokens"]) == ("remote", len(IDS))
    assert known["predicted_local_ms"] < unknown["predicted_local_ms"]
    assert await path(world) == "remote"
