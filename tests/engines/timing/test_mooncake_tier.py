"""A PD site with a tier in a Mooncake Store, under load while parts of the store die."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from prfaas.pool.shared.mooncake.mooncake_tier import MooncakeTier
from prfaas.pool.shared.mooncake.settings import MooncakeLimits, MooncakeSettings
from tests.mooncake.fixtures import Mooncake
from tests.pool.sites import Site, until

from .deployment import World, alone
from .site_of_hosts import settled, site_of
from .worlds import DENSE_PLAN, PLAN

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(300))
"""Its blocks reach to 288 tokens."""
DEADLINE_S = 4.0
BUSY_S = 30.0
LIMITS = MooncakeLimits(check_s=0.05, request_s=2, stuck_s=2, start_s=20)


def tier_of(site: Site) -> MooncakeTier:
    assert isinstance(site.node.store_room.shared, MooncakeTier)
    return site.node.store_room.shared


def num_failed(site: Site, operation: str) -> float:
    return site.metric("pool_shared_requests_total", operation=operation, outcome="failed")


async def fill(
    settings: MooncakeSettings, place: Path, checkpoint: Path, identities: Path, plan: str
) -> str:
    """Have a pool node compute and store the prompt, and end; return the answer."""
    layout = {"pool-a": {"e0": "both"}}
    async with site_of(
        place, checkpoint, identities, layout, plan_text=plan, shared=settings
    ) as world:
        site = world.sites["pool-a"]
        await until(lambda: tier_of(site).client.is_ready)
        text = await world.text(PROMPT)
        await settled(world)
        await until(lambda: len(tier_of(site)) == len(site.node.store))
    return text


async def cached(world: World) -> tuple[str, int]:
    reply = await world.complete(PROMPT)
    tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return str(reply["choices"][0]["text"]), tokens


@pytest.mark.parametrize("plan", [PLAN, DENSE_PLAN], ids=["hybrid", "dense"])
async def test_an_empty_pool_node_hits_what_is_in_the_store(
    checkpoint: Path, identities: Path, tmp_path: Path, mooncake: Mooncake, plan: str
) -> None:
    first = await fill(mooncake.settings, tmp_path, checkpoint, identities, plan)
    layout = {"pool-b": {"e1": "both"}}
    async with site_of(
        tmp_path, checkpoint, identities, layout, plan_text=plan, shared=mooncake.settings
    ) as world:
        site = world.sites["pool-b"]
        assert len(site.node.store) == 0
        await until(lambda: tier_of(site).needs_probe)
        text, tokens = await cached(world)
        assert (text, tokens) == (first, 288)
        assert text == await alone(checkpoint, tmp_path, PROMPT)
        assert site.metric("pool_hits_total", tier="shared") > 0
        assert (await world.record())["fallback"] is None
        await settled(world)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("part", ["provider", "master"])
async def test_a_part_of_the_store_that_fails_costs_a_client_only_time(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    mooncake: Mooncake,
    part: str,
    number: signal.Signals,
) -> None:
    first = await fill(mooncake.settings, tmp_path, checkpoint, identities, PLAN)
    limited = mooncake.changed(deadline_ns=int(DEADLINE_S * 1e9), limits=LIMITS)
    layout = {"pool-b": {"e1": "both"}}
    async with site_of(tmp_path, checkpoint, identities, layout, shared=limited) as world:
        site = world.sites["pool-b"]
        await until(lambda: tier_of(site).needs_probe)
        assert await cached(world) == (first, 288)
        others = [[(start + i) % 300 for i in range(200)] for start in range(40, 46)]
        texts = [await world.text(prompt) for prompt in others]
        await settled(world)
        await until(lambda: len(tier_of(site)) == len(site.node.store))
        world.forget()
        site.node.store.drop(site.node.store.in_memory())
        store = mooncake.store
        (store.master if part == "master" else store.providers[0]).signal(number)
        began_s = time.monotonic()
        found = await asyncio.gather(
            cached(world), *(world.text(prompt) for prompt in [*others, *others])
        )
        assert time.monotonic() - began_s < DEADLINE_S + BUSY_S, "one deadline for all"
        assert found == [(first, found[0][1]), *texts, *texts]
        world.forget()
        assert (await cached(world))[0] == first
        assert sum(num_failed(site, operation) for operation in ("probe", "read")) > 0
        assert site.is_running
