"""`/kv/lookup`: what a prompt would hit where, and what would be decided; nothing changes by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import LAYOUT, World, running, until
from tests.gateway.kv_publisher import Publisher, stored

IDS = list(range(300))
SECRET = "what nobody but its tenant may read"


@pytest.fixture
async def site(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> AsyncIterator[tuple[World, Publisher]]:
    """A world whose decode engine publishes KV events."""
    places = {"kv_events": f"ipc://{tmp_path}/e", "kv_events_replay": f"ipc://{tmp_path}/r"}
    publisher = Publisher(places["kv_events"], places["kv_events_replay"])
    try:
        async with running(
            checkpoint, identities, tmp_path / "state", engines={"decode": places}
        ) as world:
            await until(lambda: world.gateway.index.state("decode") == "exact")
            yield world, publisher
    finally:
        await publisher.close()


async def look(world: World, body: Any, query: str = "") -> dict[str, Any]:
    async with world.http.post(f"{world.url}/kv/lookup{query}", json=body) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


def source(found: dict[str, Any], name: str) -> dict[str, Any]:
    everybody = [s for c in found["clusters"] for s in (*c["pools"], *c["engines"])]
    one: dict[str, Any] = next(entry for entry in everybody if entry["name"] == name)
    return one


async def test_it_shows_every_pool_and_engine(site: tuple[World, Publisher]) -> None:
    world, engine = site
    index = world.gateway.index
    world.pd_pool.store(LAYOUT, world.keys(IDS, 128))
    world.prfaas_pool.store(LAYOUT, world.keys(IDS, 192)[:-1])
    engine.publish(stored(world.hashes(IDS)[:16]), stored([world.hashes(IDS)[15]], 1))
    await until(lambda: bool(index.num_blocks("prfaas-pool") and index.num_blocks("pd-pool")))
    await until(lambda: index.num_blocks("decode") == 17)
    found = await look(world, {"prompt": IDS})
    assert found["num_prompt_tokens"] == 300
    assert found["usable_tokens_max"] == 256
    assert [cluster["cluster"] for cluster in found["clusters"]] == ["prfaas", "pd"]
    pd, remote, decode = (source(found, name) for name in ("pd-pool", "prfaas-pool", "decode"))
    assert (pd["state"], pd["hit_tokens"], pd["tiers"]) == ("exact", 128, ["host", "disk"])
    assert [g["num_blocks_held"] for g in pd["groups"]] == [8, 1]
    # It has the attention of 192 tokens, and no state to go on from.
    assert (remote["hit_tokens"], remote["groups"][0]["num_tokens_held"]) == (0, 192)
    assert (decode["state"], decode["hit_tokens"], decode["tiers"]) == ("exact", 256, ["device"])
    assert decode["pool"] == "pd-pool"
    assert source(found, "spare")["state"] == "not_followed"


async def test_it_shows_what_would_be_decided_and_books_nothing(
    site: tuple[World, Publisher],
) -> None:
    world, _ = site
    dispatcher = world.gateway.driver.dispatcher
    for _ in range(3):
        decision = (await look(world, {"prompt": IDS}))["decision"]
        assert (decision["path"], decision["prefill"]) == ("remote", "prefill")
        assert (decision["source"], decision["destination"]) == ("prfaas-pool", "pd-pool")
    assert (len(dispatcher.requests), dispatcher.promised_bytes) == (0, 0)
    world.pd_pool.store(LAYOUT, world.keys(IDS, 256))
    await until(lambda: bool(world.gateway.index.num_blocks("pd-pool")))
    decision = (await look(world, {"prompt": IDS}))["decision"]
    assert (decision["path"], decision["reason"]) == ("local", "below_threshold")
    assert decision["num_new_tokens"] == 44
    assert not world.prefill.calls
    assert (await world.post({"prompt": IDS, "max_tokens": 2}))[0] == 200
    assert (await world.record())["path"] == "local"


async def test_text_messages_and_token_ids_are_taken(site: tuple[World, Publisher]) -> None:
    world, _ = site
    text = await look(world, {"prompt": SECRET})
    async with world.http.get(f"{world.url}/kv/lookup", params={"prompt": SECRET}) as response:
        assert await response.json() == text
    chat = await look(world, {"messages": [{"role": "user", "content": SECRET}]})
    assert chat["num_prompt_tokens"] > text["num_prompt_tokens"] > 10
    for found in (text, chat):
        assert SECRET not in str(found)


@pytest.mark.parametrize(
    ("query", "body", "status"),
    [
        ("", {"prompt": 3}, 400),
        ("", {}, 400),
        ("", [], 400),
        ("", {"prompt": "x", "model": "other"}, 404),
        ("?tenant=nobody", {"prompt": "x"}, 400),
    ],
)
async def test_what_it_does_not_take(world: World, query: str, body: Any, status: int) -> None:
    async with world.http.post(f"{world.url}/kv/lookup{query}", json=body) as response:
        assert response.status == status, await response.text()
        assert (await response.json())["error"]["message"]
    async with world.http.get(f"{world.url}/kv/lookup") as response:
        assert response.status == 400
    async with world.http.post(f"{world.url}/kv/lookup", data=b"{") as response:
        assert response.status == 400


async def test_events_are_counted(site: tuple[World, Publisher]) -> None:
    world, engine = site
    engine.publish(stored([1]), stored([2], medium="CPU"), {"type": "New"})
    await until(lambda: world.gateway.index.num_blocks("decode") == 1)
    for kind in ("applied", "elsewhere", "unknown"):
        sample = f'prfaas_kv_events_total{{engine="decode",kind="{kind}"}}'
        assert await world.metric(sample) == 1
    assert await world.metric('prfaas_engine_index_state{engine="decode",state="exact"}') == 1
    assert await world.metric('prfaas_engine_index_blocks{engine="decode"}') == 1
    assert await world.metric("prfaas_index_memory_bytes") > 0


async def test_garbage_among_the_events_stops_nobody(site: tuple[World, Publisher]) -> None:
    world, publisher = site
    sample = 'prfaas_engine_index_state{engine="decode",state="exact"}'
    for frames in (
        [b"x"],
        [b"", bytes(8), b"\xdd\xff\xff\xff\xff"],
        [b"", bytes(8), bytes(1 << 20)],
    ):
        publisher._pub.send_multipart(frames)
        await until(lambda: world.gateway.index.state("decode") == "degraded")
        assert await world.metric(sample) == 0
        assert (await world.post({"prompt": "hi"}))[0] == 200
        await until(lambda: world.gateway.index.state("decode") == "exact")
    assert await world.metric(sample) == 1
