import asyncio
import gzip
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.gateway.console.history import LiveState
from prfaas.gateway.console.routes import assets
from prfaas.gateway.times import Times
from prfaas.wire.messages.gateway import TierUse
from tests.gateway.conftest import World, running, until

PAGE_BYTES_MAX = 600_000


async def get(world: World, path: str, **headers: str) -> tuple[int, Any]:
    async with world.http.get(world.url + path, headers=headers) as response:
        body = await response.read()
        return response.status, json.loads(body) if body[:1] == b"{" else body


async def test_the_page_is_small_and_needs_nothing_from_elsewhere(world: World) -> None:
    async with world.http.get(f"{world.url}/console") as response:
        page = await response.text()
        assert response.url.path == "/console/"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        etag = response.headers["ETag"]
    assert 'src="./console.js"' in page
    assert "http" not in page.replace("http-equiv", "")
    assert sum(len(asset.packed) for asset in assets().values()) < PAGE_BYTES_MAX
    assert await get(world, "/console/", **{"If-None-Match": etag}) == (304, b"")


async def test_files_come_compressed_where_the_browser_takes_it(world: World) -> None:
    async with world.http.get(
        f"{world.url}/console/console.js", headers={"Accept-Encoding": "gzip"}
    ) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert await response.read() == assets()["console.js"].body
    assert gzip.decompress(assets()["console.js"].packed) == assets()["console.js"].body
    status, body = await get(world, "/console/none.js")
    assert status == 404
    assert "error" in body


async def test_the_state_tells_of_parts_requests_and_changes(world: World) -> None:
    await world.post({"model": "tiny", "prompt": "x" * 20, "max_tokens": 2})
    async with world.http.post(f"{world.url}/control/threshold", json={"tokens": 150}) as answer:
        assert answer.status == 200
    status, state = await get(world, "/console/api/state")
    assert status == 200
    assert [cluster["name"] for cluster in state["clusters"]] == ["prfaas", "pd"]
    engines = {e["name"]: e["is_ready"] for c in state["clusters"] for e in c["engines"]}
    assert engines == {"prefill": True, "decode": True, "spare": False}
    assert state["sample"]["links"]["prfaas-pool>pd-pool"]["offload_threshold"] == 150
    assert state["requests"][0]["path"] == "local"
    assert (state["changes"][0]["old"], state["changes"][0]["new"]) == (100, 150)
    assert [alarm["name"] for alarm in state["alarms"]] == ["engine_down"]
    assert "x" * 20 not in json.dumps(state)


async def test_the_state_tells_what_pools_hold_and_what_links_cost(world: World) -> None:
    use = TierUse(used_bytes=3 << 20, capacity_bytes=1 << 30, num_blocks=7)
    world.pd_pool.tiers, world.pd_pool.num_leased = {"host": use}, 2
    world.pd_pool.leased_bytes = 1 << 20
    world.pd_pool.tell_state()
    pd = world.gateway.pools.subscription("pd-pool")
    await until(lambda: bool(pd.tiers))
    _, state = await get(world, "/console/api/state")
    held = {pool["name"]: pool for cluster in state["clusters"] for pool in cluster["pools"]}
    assert held["pd-pool"]["tiers"] == [{"name": "host", **msgspec.to_builtins(use)}]
    assert (held["pd-pool"]["num_leased"], held["pd-pool"]["leased_bytes"]) == (2, 1 << 20)
    assert held["prfaas-pool"]["tiers"] == []
    link = state["sample"]["links"]["prfaas-pool>pd-pool"]
    assert (link["kv_bytes"], link["cost"]) == (0, None)
    await world.pd_pool.stop()
    await until(lambda: not pd.tiers and not pd.num_leased)
    assert pd.leased_bytes == 0


async def test_the_stream_repeats_the_state_and_has_places(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = {"gateway": {"consoles_max": 1}, "times": Times(console_interval_s=0.01)}
    async with running(checkpoint, identities, tmp_path, **tables) as world:
        await the_stream_repeats_the_state_and_has_places(world)


async def the_stream_repeats_the_state_and_has_places(world: World) -> None:
    async with world.http.get(f"{world.url}/console/api/events") as stream:
        found = [json.loads((await stream.content.readuntil(b"\n\n"))[6:]) for _ in range(3)]
        assert found[0]["at"] < found[2]["at"]
        status, body = await get(world, "/console/api/events")
        assert status == 429
        assert "1 consoles are open" in body["error"]["message"]
    console = world.gateway.console
    await until(lambda: not console._live.num_followers)


async def test_one_reading_serves_all_pages_and_none_is_made_for_nobody() -> None:
    readings: list[bytes] = []

    def read() -> bytes:
        readings.append(f"state {len(readings) + 1}".encode())
        return readings[-1]

    live = LiveState(read)
    live.beat()
    assert not readings
    with live.following(), live.following():
        assert [await live.after(0) for _ in range(2)] == [(1, b"state 1")] * 2
        waiting = [asyncio.create_task(live.after(1)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        live.beat()
        assert await asyncio.gather(*waiting) == [(2, b"state 2")] * 2
        live.beat()
        live.beat()
        # Who was slow gets the newest.
        assert await live.after(2) == (4, b"state 4")
    assert live.num_followers == 0
    with live.following():
        assert await live.after(0) == (4, b"state 4")
    live.beat()
    with live.following():
        assert await live.after(0) == (5, b"state 5")


@pytest.mark.parametrize("times", [Times(console_interval_s=0.01)])
async def test_pages_share_their_states(world: World) -> None:
    async with AsyncExitStack() as open_pages:
        streams = [
            await open_pages.enter_async_context(world.http.get(f"{world.url}/console/api/events"))
            for _ in range(3)
        ]
        seen: list[set[bytes]] = [set() for _ in streams]
        # Two readings differ in their time: only one and the same can come on all pages.
        while not set.intersection(*seen):
            for page, events in zip(streams, seen, strict=True):
                events.add(await page.content.readuntil(b"\n\n"))


async def test_the_last_hour(world: World) -> None:
    console = world.gateway.console
    await until(lambda: len(console.history) > 0)
    status, found = await get(world, "/console/api/history?seconds=60")
    assert status == 200
    assert found["samples"][0]["num_in_flight"] == 0
    assert (await get(world, "/console/api/history?seconds=0"))[0] == 400


async def test_the_planner_answers_and_refuses(world: World) -> None:
    async def ask(body: object) -> tuple[int, Any]:
        return await world.post(body, "/console/api/what-if")

    status, found = await ask({"settings": {"pd.instances": 6}})
    assert status == 200
    assert found["settings"]["pd.instances"] == 6
    assert (await ask({"settings": {"model.config": 1}}))[0] == 400
    assert (await ask([]))[0] == 400
    several = await asyncio.gather(*(ask({"settings": {"pd.instances": 6}}) for _ in range(10)))
    statuses = sorted(status for status, _ in several)
    assert statuses[0] == 200
    assert statuses[-2:] == [429, 429]


async def test_sizes_of_the_catalogue(world: World) -> None:
    status, found = await get(world, "/console/api/models")
    assert status == 200
    assert {len(model["kv_bytes"]) for model in found["models"]} == {len(found["lengths"])}


async def test_the_page_is_open_and_what_it_shows_is_the_operators(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    table = {"operator_keys": ["sha256:" + "0" * 64]}
    async with running(checkpoint, identities, tmp_path / "state", gateway=table) as world:
        assert (await get(world, "/console/"))[0] == 200
        assert (await get(world, "/console/console.css"))[0] == 200
        for path in ("state", "events", "history", "models"):
            assert (await get(world, f"/console/api/{path}"))[0] == 401
