"""Hot prefixes that only the PrfaaS cluster holds are copied home, within a budget."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.control.changes import Loop
from prfaas.core.control.replication import Replication
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.transfer.tickets import Prefix
from prfaas.gateway.loops.loops import PrefixReplication
from prfaas.units import NS_PER_S
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import Refused
from prfaas.wire.tickets import TicketOpener
from tests.gateway.conftest import LAYOUT, World, running, until
from tests.gateway.prompts import LONG
from tests.plans import plan_file

HELD = 320
"""Tokens of the prompt that the PrfaaS cluster holds: up to the last checkpoint."""


@asynccontextmanager
async def copying(
    checkpoint: Path, identities: Path, directory: Path, **routing: Any
) -> AsyncIterator[tuple[World, PrefixReplication]]:
    table = {"plan": str(plan_file(directory)), "policy": "local", "replication": "100Mbps"}
    state = directory / "state"
    async with running(checkpoint, identities, state, routing=table | routing) as world:
        await ask(world, 1)
        index, keys = world.gateway.index, held_keys(world)
        world.prfaas_pool.store(LAYOUT, keys)
        await until(lambda: index.num_blocks("prfaas-pool") == HELD // 16 + 1)
        copier = world.gateway.loops.copier
        assert copier is not None
        yield world, copier


def held_keys(world: World) -> list[BlockKey]:
    """Blocks of the prompt that was asked for last."""
    return world.keys(world.decode.calls[-1].body["prompt"], HELD)


async def ask(world: World, times: int) -> None:
    for _ in range(times):
        status, _ = await world.post({"prompt": LONG, "max_tokens": 2})
        assert status == 200


async def test_what_home_misses_again_and_again_is_copied_once(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with copying(checkpoint, identities, tmp_path) as (world, copier):
        gateway = world.gateway
        await ask(world, 1)
        gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        assert copier.num_open == 0
        await ask(world, 3)
        gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        await until(lambda: bool(world.pd_pool.pulls))
        [pull] = world.pd_pool.pulls
        assert pull.source == "prfaas-pool"
        keys = held_keys(world)
        assert keys_of(pull.keys) == keys
        [entry] = gateway.journal.latest(5)
        assert (entry.loop, entry.what) == (Loop.REPLICATION, "link prfaas-pool:pd-pool")
        num_bytes = HELD // 16 * 1024 + 2048
        budget = {"prefixes": 1, "bytes": num_bytes, "budget_bytes": 62_500_000}
        assert entry.numbers == budget
        assert gateway.driver.dispatcher.promised_bytes == num_bytes
        world.pd_pool.store(LAYOUT, keys)
        world.pd_pool.end_transfer(pull.transfer_id.hex())
        await until(lambda: copier.num_open == 0)
        assert gateway.driver.dispatcher.promised_bytes == 0
        await ask(world, 3)
        assert (await world.record())["pd_hit_tokens"] == HELD
        gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        assert copier.num_open == 0


async def test_what_a_cached_prefix_saves_is_counted_by_tenant(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with copying(checkpoint, identities, tmp_path) as (world, _):
        name = 'prfaas_tenant_saved_seconds_total{cluster="pd",tenant="default"}'
        assert await world.metric(name) == 0
        world.pd_pool.store(LAYOUT, held_keys(world))
        await until(lambda: world.gateway.index.num_blocks("pd-pool") == HELD // 16 + 1)
        await ask(world, 1)
        record = await world.record()
        num_tokens, times = record["num_prompt_tokens"], world.gateway.driver.dispatcher._times
        assert record["pd_hit_tokens"] == HELD
        saved_ns = times.local_ns(num_tokens, 0) - times.local_ns(num_tokens - HELD, HELD)
        assert saved_ns > 0
        assert await world.metric(name) == pytest.approx(saved_ns / NS_PER_S)


async def test_the_ticket_of_a_copy_allows_exactly_it(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with copying(checkpoint, identities, tmp_path) as (world, _):
        await ask(world, 3)
        world.gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        await until(lambda: bool(world.pd_pool.pulls))
        [pull] = world.pd_pool.pulls
        opener = TicketOpener(identities / "ca.pem", frozenset({"gateway"}))
        ticket = opener.open(pull.ticket, time.time_ns())
        assert (ticket.source, ticket.destination) == ("prfaas-pool", "pd-pool")
        assert ticket.transfer_id == pull.transfer_id
        assert ticket.tenant == tenant_tag(world.salt)
        assert ticket.bytes_max == HELD // 16 * 1024 + 2048


@pytest.mark.parametrize("how", ["refused", "lost", "late"])
async def test_a_copy_that_fails_is_given_up_and_frees_its_bytes(
    checkpoint: Path, identities: Path, tmp_path: Path, how: str
) -> None:
    async with copying(checkpoint, identities, tmp_path) as (world, copier):
        await ask(world, 3)
        now_ns = time.monotonic_ns()
        world.gateway.control_ticker.beat(now_ns, is_turn=True)
        await until(lambda: bool(world.pd_pool.pulls))
        assert copier.num_open == 1
        if how == "refused":
            transfer_id = world.pd_pool.pulls[0].transfer_id
            world.pd_pool.send(Refused(transfer_id=transfer_id, reason="no_room"))
        elif how == "lost":
            world.pd_pool.disconnect()
        else:
            world.gateway.control_ticker.beat(now_ns + 3600 * NS_PER_S, is_turn=False)
        await until(lambda: copier.num_open == 0)
        assert world.gateway.driver.dispatcher.promised_bytes == 0
        await ask(world, 1)


async def test_nothing_is_copied_beyond_the_budget(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with copying(checkpoint, identities, tmp_path) as (world, copier):
        settings = replace(copier._settings, budget_bytes=HELD // 16 * 1024)
        copier._hot = Replication(settings)
        await ask(world, 3)
        world.gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        assert copier.num_open == 0


async def test_nothing_is_copied_while_the_loops_are_frozen(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with copying(checkpoint, identities, tmp_path) as (world, copier):
        await ask(world, 3)
        world.gateway.control_ticker.frozen = True
        world.gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        assert copier.num_open == 0
        world.gateway.control_ticker.frozen = False
        world.gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        assert copier.num_open == 1


async def test_nothing_is_copied_over_a_link_that_is_down(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with copying(checkpoint, identities, tmp_path) as (world, copier):
        await ask(world, 3)
        world.prfaas_pool.links["pd-pool"] = False
        world.prfaas_pool.tell_state()
        await until(lambda: not world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
        world.gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        assert copier.num_open == 0


def test_a_prefix_is_named_at_its_boundaries() -> None:
    hashes = [bytes([n]) * 32 for n in range(11)]
    prefix = Prefix(LAYOUT, hashes, "salt")
    # A boundary is 64 tokens, four links of the chain: three are left over.
    assert list(prefix) == [hashes[3], hashes[7]]
    assert list(prefix[:1]) == [hashes[3]]
    assert isinstance(prefix[:1], Prefix)
    assert {key.block_hash for key in prefix.keys(0)} == set(hashes[:8])
    assert [key.block_hash for key in prefix.keys(64) if key.group == 0] == hashes[4:8]
    assert [key.block_hash for key in prefix.keys(64) if key.group == 1] == [hashes[7]]
