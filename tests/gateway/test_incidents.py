"""Incidents of a gateway: what its facts become, who sees it, and that no request waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.gateway.tenancy.tenants import key_hash, new_key
from prfaas.gateway.times import Times
from prfaas.incidents.book import IncidentBook

from .conftest import World, annexes_of, running, until
from .ctl_runner import run
from .prompts import LONG, SHORT
from .scripted_engine import die_after, refuse
from .tenant_keys import HASHES, bearer, tenants

WHEN_ASKED = Times(incident_grace_s=1e9)


@pytest.fixture
def times() -> Times:
    return WHEN_ASKED


@pytest.fixture
async def watched(world: World) -> World:
    """All is well, and the parts are connected: what comes now is an incident."""
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    book_of(world).ready_at = 0.0
    return world


def book_of(world: World) -> IncidentBook:
    return annexes_of(world).incidents.book


def found(world: World, name: str, subject: str = "") -> list[Any]:
    return [
        each
        for each in book_of(world).recent.values()
        if (each.name, each.subject) == (name, subject)
    ]


async def listed(world: World, query: str = "", **headers: str) -> list[dict[str, Any]]:
    url = f"{world.url}/control/incidents{query}"
    async with world.http.get(url, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        incidents: list[dict[str, Any]] = (await reply.json())["incidents"]
        return incidents


async def test_a_stream_that_is_lost_for_a_moment_is_an_incident(watched: World) -> None:
    """Shorter than the second between two looks."""
    watched.pd_pool.disconnect()
    await until(lambda: [each.ended_at for each in found(watched, "pool_silent", "pd-pool")] != [])
    await until(lambda: found(watched, "pool_silent", "pd-pool")[0].ended_at is not None)
    [incident] = found(watched, "pool_silent", "pd-pool")
    assert incident.ended_at - incident.began_at < 30


async def test_an_orderly_end_is_no_loss_of_pools_and_engines(watched: World) -> None:
    await watched.gateway.drain()
    watched.pd_pool.disconnect()
    await until(lambda: not watched.gateway.pools.is_live("pd-pool"))
    names = {each.name for each in book_of(watched).recent.values()}
    assert not names & {"pool_silent", "link_down", "engine_down"}


async def test_a_request_that_an_engine_left_is_told_with_the_engine(watched: World) -> None:
    watched.decode.script = die_after(2)
    stream = {"prompt": SHORT, "max_tokens": 8, "stream": True}
    async with watched.http.post(
        f"{watched.url}/v1/completions", json=stream, headers={"X-Request-Id": "touched-1"}
    ) as reply:
        await reply.read()
    watched.decode.healthy = False
    await until(lambda: bool(found(watched, "engine_down", "decode")))
    [incident] = found(watched, "engine_down", "decode")
    assert (incident.requests, incident.num_tenants) == (["touched-1"], 1)
    url = f"{watched.url}/control/incidents/{incident.id}"
    async with watched.http.get(url) as reply:
        told = await reply.json()
    assert "1 continued by another engine" in told["did"]
    assert "1 request of 1 tenant" in told["whom"]
    page = await run("incidents", incident.id, url=watched.url)
    assert "touched-1" in page.output
    assert page.exit_code == 0


async def test_a_prompt_whose_prefill_failed_touches_the_engine_and_not_the_other(
    watched: World,
) -> None:
    watched.prefill.script = refuse(500)
    await watched.post({"prompt": LONG, "max_tokens": 2})
    watched.prefill.healthy = False
    await until(lambda: bool(found(watched, "engine_down", "prefill")))
    [incident] = found(watched, "engine_down", "prefill")
    assert incident.effects == {"prefill": 1}


async def test_changes_of_operators_are_incidents(watched: World) -> None:
    for path, body in [
        ("engines/decode", {"drained": True}),
        ("loops", {"frozen": True}),
        ("threshold", {"tokens": 77}),
        ("engines/decode", {"drained": False}),
        ("loops", {"frozen": False}),
    ]:
        async with watched.http.post(f"{watched.url}/control/{path}", json=body) as reply:
            assert reply.status == 200
    drained, frozen = found(watched, "drained", "decode"), found(watched, "frozen", "loops")
    assert [each.ended_at is not None for each in (*drained, *frozen)] == [True, True]
    [threshold] = found(watched, "threshold_set", "prfaas-pool>pd-pool")
    assert threshold.ended_at is None
    assert "77" in threshold.cause
    kinds = {each["kind"] for each in await listed(watched, "?kind=operator")}
    assert kinds == {"operator"}
    opened = await listed(watched, "?kind=operator&open=1")
    assert [each["name"] for each in opened] == ["threshold_set"]


async def test_alarms_of_the_console_say_since_when_and_what_to_do(watched: World) -> None:
    watched.decode.healthy = False
    await until(lambda: bool(found(watched, "engine_down", "decode")))
    async with watched.http.get(f"{watched.url}/console/api/state") as reply:
        alarms = {(a["name"], a["subject"]): a for a in (await reply.json())["alarms"]}
    alarm, [incident] = alarms["engine_down", "decode"], found(watched, "engine_down", "decode")
    assert (alarm["incident"], alarm["since"]) == (incident.id, incident.began_at)
    assert alarm["runbook"] == "docs/runbooks/engine-down.md"
    assert alarm["todo"]


async def test_a_request_is_served_while_the_log_cannot_be_written(watched: World) -> None:
    log, folder = annexes_of(watched).incidents, watched.state / "incidents"
    await log.written()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    watched.decode.healthy = False
    await until(lambda: bool(found(watched, "engine_down", "decode")))
    await log.written()
    assert log.why_unwritten
    await watched.post({"prompt": SHORT, "max_tokens": 2})
    assert "engine_down" in {each["name"] for each in await listed(watched)}
    assert await watched.metric("prfaas_gateway_incidents_failing") == 1.0
    assert "CANNOT BE WRITTEN" in (await run("incidents", url=watched.url)).output
    await until(lambda: bool(found(watched, "incidents_not_written")))


async def test_questions_that_are_refused(watched: World) -> None:
    for query, status in [
        ("?kind=weather", 400),
        ("?since=yesterday", 400),
        ("?limit=0", 400),
        ("?limit=1001", 400),
        ("/nothing!", 404),
        ("/ffffffff", 404),
        ("/%27%20OR%201=1", 404),
        ("", 200),
    ]:
        async with watched.http.get(f"{watched.url}/control/incidents{query}") as reply:
            assert reply.status == status, query
            assert await reply.json()


@pytest.fixture
async def guarded(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    tables = {"operator_keys": [HASHES["operator"]]}
    async with running(
        checkpoint,
        identities,
        tmp_path / "state",
        times=WHEN_ASKED,
        gateway=tables,
        tenants=tenants(requests_per_minute=1),
    ) as made:
        yield made


async def test_names_of_tenants_are_for_operators(guarded: World) -> None:
    url = f"{guarded.url}/control/incidents"
    for name, status in [("red", 403), ("operator", 200)]:
        async with guarded.http.get(url, headers=bearer(name)) as reply:
            assert reply.status == status
    async with guarded.http.get(url) as reply:
        assert reply.status == 401
    assert key_hash(new_key()) not in HASHES.values()


async def test_a_tenant_over_its_own_limit_is_no_incident(guarded: World) -> None:
    body = {"prompt": SHORT, "max_tokens": 2}
    statuses = []
    for _ in range(3):
        async with guarded.http.post(
            f"{guarded.url}/v1/completions", json=body, headers=bearer("red")
        ) as reply:
            statuses.append(reply.status)
    assert statuses[-1] == 429
    assert not found(guarded, "refusals")
