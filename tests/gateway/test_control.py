"""The control API: what an operator changes holds, is told, and is checked before."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from yarl import URL

from prfaas.core.control.changes import Loop
from prfaas.core.control.threshold_loop import Pressures
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import ThresholdMoved
from prfaas.gateway.app import Gateway
from prfaas.gateway.loops.ticker import QUIET_BEATS, ControlTicker
from prfaas.gateway.routing.change_log import ENTRIES_MAX, Journal
from prfaas.units import NS_PER_S
from tests.plans import plan_file

from .conftest import THRESHOLD, World, running, until
from .ctl_runner import run
from .prompts import LONG, SHORT


async def control(world: World, path: str, **body: object) -> tuple[int, dict[str, Any]]:
    return await world.post(body, f"/control/{path}")


async def run_ctl(world: World) -> Result:
    return await run("status", url=world.url)


async def view(world: World, path: str) -> dict[str, Any]:
    async with world.http.get(f"{world.url}/control/{path}") as response:
        found: dict[str, Any] = await response.json()
        return found


async def sent(world: World, prompt: str) -> dict[str, Any]:
    status, _ = await world.post({"prompt": prompt, "max_tokens": 2})
    assert status == 200
    return await world.record()


async def test_a_threshold_that_was_set_routes_the_next_request(world: World) -> None:
    assert (await sent(world, LONG))["path"] == "remote"
    status, answer = await control(world, "threshold", tokens=5000)
    assert status == 200
    [entry] = answer["decisions"]
    assert (entry["loop"], entry["action"]) == ("operator", "threshold")
    assert (entry["old"], entry["new"]) == (THRESHOLD, 5000)
    assert entry["what"] == "link prfaas-pool:pd-pool"
    record = await sent(world, LONG)
    assert (record["path"], record["offload_threshold"]) == ("local", 5000)
    one_link = {"source": "prfaas-pool", "destination": "pd-pool"}
    assert (await control(world, "threshold", tokens=1, **one_link))[0] == 200
    assert (await sent(world, LONG))["path"] == "remote"
    assert (await view(world, "decisions"))["decisions"][0]["new"] == 1
    sample = 'prfaas_loop_actions_total{action="threshold",loop="operator"}'
    assert await world.metric(sample) == 2


async def test_what_was_set_stays_until_it_is_unset(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """With a plan the threshold follows the requests; each move is an entry, and none is made of
    what the operator has set."""
    table = {"plan": str(plan_file(tmp_path))}
    async with running(checkpoint, identities, tmp_path / "state", routing=table) as world:
        gateway: Gateway = world.gateway
        for _ in range(3):
            await sent(world, SHORT)
        gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        [entry] = gateway.journal.latest(10)
        assert (entry.loop, entry.old) == (Loop.THRESHOLD, THRESHOLD)
        assert entry.numbers["requests"] == 3
        assert "3 requests" in entry.why
        assert (await view(world, "status"))["loops"]["threshold"]
        await control(world, "threshold", tokens=30_000)
        for _ in range(3):
            await sent(world, SHORT)
            gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        [link] = (await view(world, "status"))["links"]
        assert (link["offload_threshold"], link["is_threshold_set"]) == (30_000, True)
        assert "threshold 30,000 tokens, set by the operator" in (await run_ctl(world)).output
        status, answer = await control(world, "threshold", tokens=None)
        assert status == 200
        [entry] = answer["decisions"]
        assert (entry["action"], entry["old"], entry["new"]) == ("unset", 30_000, THRESHOLD)
        [link] = (await view(world, "status"))["links"]
        assert not link["is_threshold_set"]


async def test_a_drained_engine_gets_nothing_new_whatever_its_health(world: World) -> None:
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    assert (await control(world, "engines/decode", drained=True))[0] == 200
    for _ in range(3):
        assert (await sent(world, SHORT))["decode_engine"] == "spare"
    # It goes down and comes back: it stays drained.
    world.decode.healthy = False
    await until(lambda: not world.gateway.engines.by_name["decode"].is_ready)
    world.decode.healthy = True
    await until(lambda: world.gateway.engines.by_name["decode"].is_ready)
    assert (await sent(world, SHORT))["decode_engine"] == "spare"
    engines = {engine["name"]: engine for engine in (await view(world, "status"))["engines"]}
    assert engines["decode"]["is_drained"]
    assert engines["decode"]["is_ready"]
    assert not engines["spare"]["is_drained"]
    _, answer = await control(world, "engines/spare", drained=True)
    assert "503 until one is resumed" in answer["decisions"][0]["why"]
    for path, body in (("/v1/completions", {"prompt": SHORT}), ("/tokenize", {"prompt": SHORT})):
        status, refused = await world.post(body, path)
        assert status == 503
        assert "the operator has drained" in refused["error"]["message"]
        assert "`prfaas ctl resume ENGINE`" in refused["error"]["message"]
    await control(world, "engines/decode", drained=False)
    assert (await sent(world, SHORT))["decode_engine"] == "decode"


async def test_a_cluster_that_is_off_is_not_used(world: World) -> None:
    assert (await control(world, "clusters/prfaas", on=False))[0] == 200
    record = await sent(world, LONG)
    assert (record["path"], record["reason"]) == ("local", "no_prefill_instance")
    assert (await control(world, "clusters/prfaas", on=True))[0] == 200
    assert (await sent(world, LONG))["path"] == "remote"
    status, answer = await control(world, "clusters/pd", on=False)
    assert status == 409
    assert "nothing could decode" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("threshold", {}, 400, "tokens"),
        ("threshold", {"tokens": 0}, 400, "tokens"),
        ("threshold", {"tokens": "many"}, 400, "tokens"),
        ("threshold", {"tokens": 10**12}, 400, "tokens"),
        ("threshold", {"tokens": 10, "source": "a"}, 400, "destination"),
        ("threshold", {"tokens": 10, "source": "a", "destination": "b"}, 404, "no link 'a:b'"),
        ("threshold", {"tokens": 10, "link": "a:b"}, 400, "link"),
        ("engines/nobody", {"drained": True}, 404, "prefill, decode, spare"),
        ("engines/decode", {"drained": "yes"}, 400, "drained"),
        ("clusters/nowhere", {"on": False}, 404, "prfaas, pd"),
        ("loops", {"frozen": 1}, 400, "frozen"),
        ("loops", ["frozen"], 400, "frozen"),
        ("loops", {"frozen": True, "more": "x" * 5000}, 413, "4096"),
    ],
)
async def test_wrong_orders_change_nothing(
    world: World, path: str, body: object, status: int, says: str
) -> None:
    found, answer = await world.post(body, f"/control/{path}")
    assert (found, says in answer["error"]["message"]) == (status, True), answer
    assert (await view(world, "decisions"))["decisions"] == []


async def test_an_order_may_come_in_pieces(world: World) -> None:
    order = b'{"frozen": true}'
    head = f"POST /control/loops HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(order)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(world.url).port)
    writer.write(head.encode() + order[:5])
    await writer.drain()
    await view(world, "status")  # What was sent before has been read by the time this is answered.
    writer.write(order[5:])
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await writer.wait_closed()


async def test_orders_have_to_be_json(world: World) -> None:
    """A form that another site's page posts from an operator's browser is none."""
    url = f"{world.url}/control/loops"
    async with world.http.post(url, data='{"frozen": true}') as response:
        assert response.status == 415
    headers = {"Content-Type": "application/json"}
    async with world.http.post(url, data=b'{"frozen": tr', headers=headers) as response:
        assert response.status == 400
    assert not world.gateway.control_ticker.frozen


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "after=-1", "after=" + "9" * 20]
)
async def test_decisions_are_asked_for_within_limits(world: World, query: str) -> None:
    async with world.http.get(f"{world.url}/control/decisions?{query}") as response:
        assert response.status == 400


async def test_why_a_request_went_where_it_went(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    table = {"plan": str(plan_file(tmp_path))}
    async with running(checkpoint, identities, tmp_path / "state", routing=table) as world:
        record = await sent(world, LONG)
        found = await view(world, f"requests/{record['request_id']}/explanation")
        decision, [way], happened = found["decision"], found["clusters"], found["happened"]
        assert (decision["path"], decision["reason"]) == ("remote", "above_threshold")
        assert decision["predicted_local_ms"] == record["predicted_local_ms"]
        assert (way["cluster"], way["obstacle"]) == ("prfaas", None)
        assert way["link"] == "prfaas-pool:pd-pool"
        assert way["link_bits_per_s"] == 1e9
        assert way["local_wait_ms"] == way["remote_wait_ms"] == 0
        by_name = {candidate["engine"]: candidate for candidate in found["candidates"]}
        assert set(by_name) == {"decode", "prefill"}
        assert by_name["prefill"]["where"] == "prfaas"
        assert by_name["decode"]["dropped"] is None
        scores = {"short_wait", "cached_prefix", "few_open", "on_device"}
        assert set(by_name["decode"]["scores"]) == scores
        assert by_name["decode"]["score"] == sum(by_name["decode"]["scores"].values())
        assert happened["prefill_engine"] == "prefill"
        assert happened["predicted_ttft_ms"] == decision["predicted_remote_ms"]
        assert happened["e2e_ms"] >= happened["prefill_ms"] > 0
        async with world.http.get(f"{world.url}/control/requests/none/explanation") as response:
            assert response.status == 404
        json.dumps(found)


async def test_a_barred_way_says_what_bars_it(world: World) -> None:
    world.prfaas_pool.links["pd-pool"] = False
    world.prfaas_pool.tell_state()
    await until(lambda: not world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
    record = await sent(world, LONG)
    found = await view(world, f"requests/{record['request_id']}/explanation")
    assert found["clusters"][0]["obstacle"] == "link_down"
    dropped = {c["engine"]: c["dropped"] for c in found["candidates"]}
    assert dropped == {"decode": None, "prefill": "link_down"}


async def test_a_frozen_loop_moves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = ThresholdMoved("prfaas-pool", "pd-pool", 100, 105, Pressures(0.5, 0, 9 * NS_PER_S))
    monkeypatch.setattr(Dispatcher, "tick", lambda _self, _now: [moved])
    gateway: Gateway = world.gateway
    assert (await control(world, "loops", frozen=True))[0] == 200
    gateway.control_ticker.beat(0, is_turn=True)
    assert len(gateway.journal.latest(10)) == 1
    assert (await view(world, "status"))["loops"]["frozen"]
    await control(world, "loops", frozen=False)
    gateway.control_ticker.beat(0, is_turn=True)
    [entry, *_] = gateway.journal.latest(10)
    assert (entry.loop, entry.action, entry.old, entry.new) == (Loop.THRESHOLD, "raised", 100, 105)
    assert entry.numbers == {"local_wait_s": 0, "remote_wait_s": 9, "link_utilisation": 0.5}
    assert "remote side" in entry.why


async def test_refusals_are_told_once_until_they_end(world: World) -> None:
    driver, journal = world.gateway.driver, Journal()
    control_ticker = ControlTicker(driver, world.gateway.guards, journal)
    for num_refused in (0, 3, 2, *(0,) * QUIET_BEATS, 0, 1):
        driver.num_late += num_refused
        control_ticker.beat(0, is_turn=False)
    told = [(entry.action, entry.numbers["refused"]) for entry in journal.latest(10)[::-1]]
    assert told == [("began", 3), ("ended", 5), ("began", 1)]


def test_the_journal_forgets_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    caplog.set_level(logging.INFO)
    for number in range(ENTRIES_MAX + 5):
        journal.note(Loop.OPERATOR, "threshold", "all links", old=number, new=1, why="so said")
    newest = journal.latest(ENTRIES_MAX + 5)
    assert len(newest) == ENTRIES_MAX
    assert (newest[0].number, newest[-1].number) == (ENTRIES_MAX + 5, 6)
    assert [entry.number for entry in journal.latest(9, after=ENTRIES_MAX + 3)] == [
        ENTRIES_MAX + 5,
        ENTRIES_MAX + 4,
    ]
    assert caplog.messages[3] == (
        'control loop=operator action=threshold what="all links" old=3 new=1 why="so said"'
    )
