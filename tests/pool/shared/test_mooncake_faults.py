"""A Mooncake Store that fails: no wrong byte, no failed engine, a bounded wait, then misses.

SIGKILL and SIGSTOP of the real provider, master and client.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from prfaas.pool.shared.mooncake.settings import MooncakeLimits
from prfaas.wire.messages.engine import HIT, MISS
from prfaas.wire.messages.gateway import Evicted
from tests.mooncake.fixtures import PATIENT, Mooncake
from tests.pool.conftest import World
from tests.pool.mooncake_sites import KEYS, connected, filled, mooncake_of
from tests.pool.shared_sites import OTHER, loads_right, num_keys, start
from tests.pool.sites import Engine, Site, subscribe, until

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 4.0
"""Long enough for a read on a busy machine."""
BUSY_S = 20.0
"""Time that a machine with other work may add; a call of the library to a process that is stopped
takes for ever."""
LIMITS = MooncakeLimits(check_s=0.05, request_s=2, stuck_s=2, start_s=20)


async def reader_of(world: World, mooncake: Mooncake) -> tuple[Site, Engine]:
    """A node that knows the blocks that another one has written."""
    await filled(world, mooncake.settings)
    limited = mooncake.changed(deadline_ns=int(DEADLINE_S * 1e9), limits=LIMITS)
    site, engine = await connected(world, limited, OTHER)
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)
    return site, engine


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("part", ["provider", "master"])
async def test_a_store_that_fails_costs_one_deadline_and_then_nothing(
    world: World, mooncake: Mooncake, part: str, number: signal.Signals
) -> None:
    site, engine = await reader_of(world, mooncake)
    watch = await subscribe(site, world.identities)
    store = mooncake.store
    (store.master if part == "master" else store.providers[0]).signal(number)
    began_s = time.monotonic()
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert time.monotonic() - began_s < DEADLINE_S + BUSY_S
    await until(lambda: site.metric("pool_shared_up") == 0)
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    await until(lambda: num_keys(watch, Evicted) >= len(KEYS))
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    watch.channel.close("done")
    if number is signal.SIGSTOP:
        (store.master if part == "master" else store.providers[0]).signal(signal.SIGCONT)
    elif part == "master":
        await asyncio.to_thread(store.replace_master)
    else:
        await asyncio.to_thread(store.add_provider)
    await until(lambda: site.metric("pool_shared_up") == 1)
    assert await engine.store(KEYS)
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)


async def test_a_master_that_hangs_holds_up_a_look_up_for_a_part_of_the_deadline(
    world: World, mooncake: Mooncake
) -> None:
    await filled(world, mooncake.settings)
    limited = mooncake.changed(deadline_ns=int(DEADLINE_S * 1e9), limits=PATIENT)
    site, engine = await connected(world, limited, OTHER)
    mooncake.store.master.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    assert time.monotonic() - began_s < limited.probe_limit_s + BUSY_S
    assert site.metric("pool_shared_requests_total", operation="probe", outcome="failed") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_a_client_that_dies_or_hangs_is_replaced_and_the_node_lives(
    world: World, mooncake: Mooncake, number: signal.Signals
) -> None:
    site, engine = await reader_of(world, mooncake)
    client = mooncake_of(site).client
    first = client.process_id
    assert first is not None
    os.kill(first, number)
    await loads_right(engine, KEYS)
    await until(lambda: client.process_id != first and client.is_ready)
    await until(lambda: site.metric("pool_shared_up") == 1)
    await until(lambda: mooncake_of(site).needs_probe)
    while not all(await loads_right(engine, KEYS)):
        await engine.look_up(KEYS)
    assert site.metric("pool_shared_client_starts_total") >= 2
    assert site.is_running


async def test_a_node_starts_without_a_master_and_uses_it_once_it_is_there(
    world: World, mooncake: Mooncake
) -> None:
    mooncake.store.master.signal(signal.SIGKILL)
    site = await start(world, mooncake.changed(limits=LIMITS))
    engine = await world.engine("pd-pool")
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    assert await engine.store(KEYS)
    await until(lambda: site.metric("pool_shared_client_starts_total") >= 2)
    await asyncio.to_thread(mooncake.store.replace_master)
    await until(lambda: mooncake_of(site).client.is_ready)
