"""A prefix that only the PrfaaS pool holds is fetched for one request, and nothing else is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prfaas.cli.operate.ctl_views import explain_lines
from prfaas.core.admission.quotas import TokenBucket
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from prfaas.units import NS_PER_S
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import Pull, Refused
from prfaas.wire.tickets import TicketOpener
from tests.gateway.conftest import LAYOUT, World, running, until
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import ScriptedEngine, hang
from tests.plans import plan_file

HELD = 320
NUM_BYTES = HELD // 16 * 1024 + 2048
LINK = ("prfaas-pool", "pd-pool")


@asynccontextmanager
async def pulling(
    checkpoint: Path, identities: Path, directory: Path, **tables: Any
) -> AsyncIterator[World]:
    """The PrfaaS pool holds most of `LONG`, which stays at home."""
    plan = str(plan_file(directory, remote_s=30))
    routing = {"plan": plan, "offload_threshold": 1000, "pull": True, **tables.pop("routing", {})}
    state = directory / "state"
    async with running(checkpoint, identities, state, routing=routing, **tables) as world:
        await ask(world)
        index = world.gateway.index
        world.prfaas_pool.store(LAYOUT, world.keys(world.decode.calls[-1].body["prompt"], HELD))
        await until(lambda: index.num_blocks("prfaas-pool") == HELD // 16 + 1)
        world.decode.cached_tokens = HELD
        yield world
        dispatcher = world.gateway.driver.dispatcher
        assert (len(dispatcher.requests), dispatcher.promised_bytes) == (0, 0)


async def ask(world: World) -> dict[str, Any]:
    status, _ = await world.post({"prompt": LONG, "max_tokens": 2})
    assert status == 200
    return await world.record()


@asynccontextmanager
async def waiting(world: World) -> AsyncIterator[tuple[asyncio.Task[dict[str, Any]], Pull]]:
    """A request whose engine waits for its prefix until this is left."""
    gate = asyncio.Event()

    async def wait(
        engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await gate.wait()
        return await engine.answer(request, body)

    world.decode.script = wait
    asked = asyncio.create_task(ask(world))
    await until(lambda: bool(world.pd_pool.pulls) and len(world.decode.calls) == 2)
    yield asked, world.pd_pool.pulls[-1]
    gate.set()
    await asyncio.wait([asked])


async def num_pulls(world: World, outcome: str) -> float:
    labels = f'destination="pd-pool",outcome="{outcome}",source="prfaas-pool"'
    return await world.metric(f"prfaas_pulls_total{{{labels}}}")


async def test_the_pool_at_home_is_asked_for_what_it_lacks_and_the_engine_waits(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path) as world:
        async with waiting(world) as (asked, pull):
            call = world.decode.calls[-1]
            assert keys_of(pull.keys) == world.keys(call.body["prompt"], HELD)
            opener = TicketOpener(identities / "ca.pem", frozenset({"gateway"}))
            ticket = opener.open(pull.ticket, time.time_ns())
            assert (ticket.source, ticket.destination) == LINK
            assert (ticket.transfer_id, ticket.bytes_max) == (pull.transfer_id, NUM_BYTES)
            assert ticket.tenant == tenant_tag(world.salt)
            assert call.body["kv_transfer_params"]["prfaas"] == {
                "transfer": pull.transfer_id.hex(),
                "source": "prfaas-pool",
                "wait_ms": 10_000,
            }
            assert world.gateway.driver.dispatcher.promised_bytes > 0
            world.pd_pool.end_transfer(pull.transfer_id.hex(), num_bytes=NUM_BYTES)
            await until(lambda: world.gateway.driver.dispatcher.promised_bytes == 0)
        record = await asked
        assert (record["path"], record["fallback"]) == ("local", None)
        assert record["cached_tokens"] == HELD
        assert (record["pull_tokens"], record["pulled_tokens"]) == (HELD, HELD)
        assert (record["transfer_state"], record["kv_bytes"]) == ("committed", NUM_BYTES)
        assert await num_pulls(world, "whole") == 1
        labels = 'destination="pd-pool",source="prfaas-pool"'
        assert await world.metric(f"prfaas_pulled_tokens_total{{{labels}}}") == HELD
        assert not world.pd_pool.aborts
        assert [told.transfer_id for told in world.pd_pool.releases] == [pull.transfer_id]
        found = await explained(world, record)
        assert found["decision"]["pull_tokens"] == found["happened"]["pulled_tokens"] == HELD
        lines = explain_lines(found)
        said = "pulls the 320 tokens more that the PrfaaS cluster holds"
        assert any(said in line for line in lines)
        assert "  pulled       320 tokens, not computed" in lines


async def test_the_papers_abundant_rule_fetches_the_longer_prefix(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    paper = {"policy": "paper", "bandwidth": "abundant", "pull": False}
    async with pulling(checkpoint, identities, tmp_path, routing=paper) as world:
        async with waiting(world) as (asked, pull):
            assert keys_of(pull.keys) == world.keys(world.decode.calls[-1].body["prompt"], HELD)
            world.pd_pool.end_transfer(pull.transfer_id.hex(), num_bytes=NUM_BYTES)
        record = await asked
        assert (record["reason"], record["pull_tokens"]) == ("below_threshold", HELD)
        assert record["pulled_tokens"] == HELD


async def explained(world: World, record: dict[str, Any]) -> dict[str, Any]:
    url = f"{world.url}/control/requests/{record['request_id']}/explanation"
    async with world.http.get(url) as response:
        found: dict[str, Any] = await response.json()
        return found


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("refused", "refused"),
        ("no_room", "no_room"),
        ("link", "link_lost"),
        ("source", "pool_down"),
        ("home", "pool_down"),
        ("timeout", "timeout"),
    ],
)
async def test_a_pull_that_fails_is_given_up_and_the_engine_goes_on(
    checkpoint: Path, identities: Path, tmp_path: Path, how: str, reason: str
) -> None:
    routing = {"transfer_timeout": "200ms"} if how == "timeout" else {}
    async with pulling(checkpoint, identities, tmp_path, routing=routing) as world:
        world.decode.cached_tokens = 64
        async with waiting(world) as (asked, pull):
            match how:
                case "refused":
                    refusal = Refused(transfer_id=pull.transfer_id, reason="no_room")
                    world.pd_pool.send(refusal)
                case "no_room" | "link":
                    said = "no_room" if how == "no_room" else "link_lost"
                    world.pd_pool.end_transfer(pull.transfer_id.hex(), said)
                case "source" | "home":
                    pool = world.prfaas_pool if how == "source" else world.pd_pool
                    pool.disconnect()
            # The engine's pool is told that nothing more comes, so that it waits no longer.
            told = world.prfaas_pool if how == "home" else world.pd_pool
            await until(lambda: bool(told.aborts))
            assert told.aborts[0].transfer_id == pull.transfer_id
            assert world.gateway.driver.dispatcher.promised_bytes == 0
        record = await asked
        assert (record["path"], record["outcome"]) == ("local", "finished")
        assert record["fallback"] == {"stage": "pull", "reason": reason}
        assert record["pulled_tokens"] == 64
        assert await num_pulls(world, reason) == 1
        assert await world.metric(f'prfaas_fallback_total{{reason="{reason}",stage="pull"}}') == 0


async def test_an_engine_that_finds_less_than_was_pulled_is_told_of(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path) as world:
        world.decode.cached_tokens = 128
        async with waiting(world) as (asked, pull):
            world.pd_pool.end_transfer(pull.transfer_id.hex())
            await until(lambda: world.gateway.driver.dispatcher.promised_bytes == 0)
        record = await asked
        assert record["fallback"] == {"stage": "pull", "reason": "blocks_missing"}
        assert record["pulled_tokens"] == 128
        assert await num_pulls(world, "blocks_missing") == 1


async def test_pools_that_refuse_open_the_breaker_of_the_link(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path) as world:
        breaker = world.gateway.guards.breakers[LINK]
        while breaker.state is BreakerState.CLOSED:
            world.decode.calls[1:] = []
            world.pd_pool.pulls.clear()
            world.pd_pool.aborts.clear()
            async with waiting(world) as (_, pull):
                world.pd_pool.send(Refused(transfer_id=pull.transfer_id, reason="no_room"))
                await until(lambda: bool(world.pd_pool.aborts))
        record = await ask(world)
        assert (record["pull_tokens"], record["reason"]) == (0, "below_threshold")


async def test_a_client_that_leaves_takes_the_pull_along(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path) as world:
        world.decode.script = hang
        asked = asyncio.create_task(ask(world))
        await until(lambda: bool(world.pd_pool.pulls) and world.decode.hanging.is_set())
        asked.cancel()
        await until(lambda: bool(world.pd_pool.aborts) and bool(world.prfaas_pool.aborts))
        assert world.pd_pool.aborts[0].transfer_id == world.pd_pool.pulls[0].transfer_id
        await until(lambda: len(world.gateway.driver.dispatcher.requests) == 0)
        assert await num_pulls(world, "ended_early") == 1


async def test_pulled_bytes_count_for_their_tenant(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """A tenant that has used its share of the links computes what lies away."""
    async with pulling(checkpoint, identities, tmp_path) as world:
        quota = world.gateway.tenants.by_name[DEFAULT_NAME].quota
        assert quota.may_ship(time.monotonic_ns())
        quota._link = TokenBucket(1, NS_PER_S)
        assert (await ask(world))["pull_tokens"] == HELD
        labels = f'tenant="{DEFAULT_NAME}"'
        assert await world.metric(f"prfaas_tenant_link_bytes_total{{{labels}}}") == NUM_BYTES
        assert not quota.may_ship(time.monotonic_ns())
        record = await ask(world)
        assert (record["pull_tokens"], record["fallback"]) == (0, None)


async def test_without_the_option_nothing_is_pulled(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path, routing={"pull": False}) as world:
        record = await ask(world)
        assert (record["pull_tokens"], record["pulled_tokens"]) == (0, None)
        assert not world.pd_pool.pulls
