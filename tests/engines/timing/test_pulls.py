"""A prefix that only the PrfaaS cluster holds is fetched for a prompt that is prefilled at home."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.engines.timing.pulled_prefixes import (
    KNOWN,
    PROMPT,
    SPLIT,
    check_nothing_is_held,
    outcomes,
    pulling,
)
from tests.pool.sites import until

from .deployment import PD_ENGINES, World, alone

pytestmark = pytest.mark.timeout(120)
SLOW_BITS_PER_S = 10_000


async def test_what_lies_away_comes_and_is_found(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path) as world:
        reply = await world.complete(PROMPT)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("local", None)
        assert (record["pull_tokens"], record["pulled_tokens"]) == (176, 176)
        assert record["transfer_state"] == "committed"
        assert record["kv_bytes"] == 176 * 64 + 4096
        assert (record["source_pool"], record["destination_pool"]) == ("prfaas-pool", "pd-pool")
        assert "pulls the 176 tokens more" in record["explanation"]
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, PROMPT)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 176
        counts = [world.instance(name).counts for name in PD_ENGINES]
        assert sum(count.external_hit_tokens for count in counts) == 176
        assert world.instance("prfaas-0").counts.prompt_tokens == len(KNOWN)
        assert await outcomes(world) == {"whole": 1}
        # It is at home from here on.
        await world.complete([*PROMPT, 8, 9])
        assert (await world.record())["pull_tokens"] == 0
        await until(world.is_quiet)
        check_nothing_is_held(world)
        assert all(site.node.store.order.num_leased == 0 for site in world.sites.values())


async def test_an_engine_that_only_prefills_pulls_and_hands_over(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path, SPLIT) as world:
        reply = await world.complete(PROMPT)
        record = await world.record()
        assert (record["prefill_engine"], record["decode_engine"]) == PD_ENGINES
        assert (record["path"], record["fallback"], record["pulled_tokens"]) == ("local", None, 176)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 176
        assert world.instance("pd-0").counts.external_hit_tokens == 176
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, PROMPT)
        await until(world.is_quiet)
        check_nothing_is_held(world)


@pytest.mark.parametrize("roles", [{}, SPLIT], ids=["both", "split"])
async def test_a_source_that_dies_in_the_middle_costs_only_time(
    checkpoint: Path, identities: Path, tmp_path: Path, roles: dict[str, str]
) -> None:
    async with pulling(checkpoint, identities, tmp_path, roles) as world:
        asked = await under_way(world)
        await world.sites["prfaas-pool"].kill()
        text = (await asked)["choices"][0]["text"]
        assert text == await alone(checkpoint, tmp_path, PROMPT)
        record = await world.record()
        assert record["path"] == "local"
        assert record["fallback"]["stage"] == "pull"
        assert record["pulled_tokens"] == 0
        assert await outcomes(world) == {record["fallback"]["reason"]: 1}
        del world.sites["prfaas-pool"]
        await until(world.is_quiet)
        check_nothing_is_held(world)


async def test_a_pull_that_is_late_is_left(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path) as world:
        asked = await under_way(world)
        text = (await asked)["choices"][0]["text"]
        assert text == await alone(checkpoint, tmp_path, PROMPT)
        assert (await world.record())["fallback"] == {"stage": "pull", "reason": "late"}
        assert await outcomes(world) == {"late": 1}
        await until(world.is_quiet)
        check_nothing_is_held(world)


async def test_who_leaves_takes_the_pull_along(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pulling(checkpoint, identities, tmp_path) as world:
        asked = await under_way(world)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(world.is_quiet)
        assert await outcomes(world) == {"ended_early": 1}
        check_nothing_is_held(world)
        assert all(site.node.store.order.num_leased == 0 for site in world.sites.values())


async def under_way(world: World) -> asyncio.Task[dict[str, Any]]:
    """Ask for the prompt over a slow wire: its engine waits, and the prefix has not come."""
    world.wire.read_bits_per_s = SLOW_BITS_PER_S
    local = world.sites["pd-pool"].node
    asked = asyncio.create_task(world.complete(PROMPT))
    await until(lambda: local.inbound.known.num_open == 1)
    return asked
