"""Two PrfaaS hosts and two PD hosts: prefixes cross hosts of a site, and failures cost time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from tests.lab.faults import Fault
from tests.pool.sites import until

from .deployment import alone
from .pulled_prefixes import check_nothing_is_held, outcomes
from .site_of_hosts import SiteWorld, only, settled, site_of

pytestmark = pytest.mark.timeout(180)
BOTH = {"pool-a": {"e0": "both"}, "pool-b": {"e1": "both"}}
APART = {"pool-a": {"p": "prefill"}, "pool-b": {"d": "decode"}}
AWAY = {"pool-x": ["r0"], "pool-y": ["r1"]}
KNOWN = list(range(289))
"""Its blocks reach to 288 tokens."""
PROMPT = KNOWN[:288] + [7] * 120
SLOW_BITS_PER_S = 10_000


@asynccontextmanager
async def sites(
    checkpoint: Path, identities: Path, tmp_path: Path, *, known_to: str, **changes: Any
) -> AsyncIterator[SiteWorld]:
    """Two hosts in each cluster; one PrfaaS engine has computed `KNOWN` for somebody else."""
    layout = changes.pop("layout", BOTH)
    routing = {"policy": "remote", **changes.pop("routing", {})}
    async with site_of(
        tmp_path, checkpoint, identities, layout, remote=AWAY, routing=routing, **changes
    ) as world:
        salt = salt_of(deployment_secret(tmp_path / "state"), DEFAULT_NAME)
        body = {"prompt": KNOWN, "cache_salt": salt, "max_tokens": 1, "temperature": 0}
        url = world.gateway.engines.by_name[known_to].url
        async with world.http.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200
        await settled(world)
        world.forget()
        yield world


async def test_a_hit_on_any_prfaas_host_is_a_hit_on_every_one(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with sites(checkpoint, identities, tmp_path, known_to="r0") as world:
        only(world, "r1", "e0", "e1")
        text = await world.text(PROMPT)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert (record["prefill_engine"], record["source_pool"]) == ("r1", "pool-y")
        assert (record["cached_tokens"], record["pulled_tokens"]) == (288, 288)
        assert record["transfer_state"] == "committed"
        assert record["kv_bytes"] == 400 * 64 + 4096, "the WAN carries what PD lacks, once"
        assert world.instance("r1").counts.external_hit_tokens == 288
        assert world.instance("r1").counts.prompt_tokens == len(PROMPT)
        assert text == await alone(checkpoint, tmp_path, PROMPT)
        assert await outcomes(world) == {"whole": 1}
        await settled(world)
        check_nothing_is_held(world)
        assert all(site.node.store.order.num_leased == 0 for site in world.sites.values())


async def test_a_prefix_goes_from_prfaas_host_to_host_and_on_to_the_pd_host_that_decodes(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with sites(checkpoint, identities, tmp_path, known_to="r1", layout=APART) as world:
        only(world, "r0", "p", "d")
        text = await world.text(PROMPT)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert (record["prefill_engine"], record["decode_engine"]) == ("r0", "d")
        assert (record["source_pool"], record["destination_pool"]) == ("pool-x", "pool-b")
        assert record["pulled_tokens"] == 288
        assert world.instance("d").counts.external_hit_tokens == 400
        assert text == await alone(checkpoint, tmp_path, PROMPT)


async def test_a_prefix_is_pulled_for_a_prefill_on_another_host_than_decode(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = str(tmp_path / "plan.toml")
    routing = {"policy": "adaptive", "offload_threshold": 300, "pull": True, "plan": plan}
    async with sites(
        checkpoint, identities, tmp_path, known_to="r1", layout=APART, routing=routing
    ) as world:
        text = await world.text(PROMPT[:300])
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("local", None)
        assert (record["prefill_engine"], record["decode_engine"]) == ("p", "d")
        assert (record["pull_tokens"], record["pulled_tokens"]) == (288, 288)
        assert (record["source_pool"], record["destination_pool"]) == ("pool-a", "pool-b")
        assert world.instance("p").counts.external_hit_tokens == 288
        assert world.instance("d").counts.external_hit_tokens == 288
        assert text == await alone(checkpoint, tmp_path, PROMPT[:300])
        assert await outcomes(world) == {"whole": 1}
        await settled(world)
        check_nothing_is_held(world)


@pytest.mark.parametrize("fault", ["dead", "cut", "hung"])
async def test_a_prfaas_host_that_is_lost_in_the_middle_of_a_pull_costs_only_time(
    checkpoint: Path, identities: Path, tmp_path: Path, fault: str
) -> None:
    async with sites(checkpoint, identities, tmp_path, known_to="r0") as world:
        only(world, "r1", "e0", "e1")
        wire, puller = world.wires["pool-y"], world.sites["pool-y"].node
        wire.read_bits_per_s = SLOW_BITS_PER_S
        asked = asyncio.create_task(world.text(PROMPT))
        await until(lambda: puller.inbound.known.num_open == 1)
        match fault:
            case "dead":
                await world.sites.pop("pool-x").kill()
            case "cut":
                wire.is_plugged = False
                wire.strike(Fault.RESET)
            case "hung":
                wire.strike(Fault.HALF_OPEN)
        assert await asked == await alone(checkpoint, tmp_path, PROMPT)
        record = await world.record()
        assert record["outcome"] == "finished"
        assert record["fallback"]["stage"] == "pull"
        assert record["pulled_tokens"] == 0
        wire.is_plugged, wire.read_bits_per_s = True, 0
        await until(world.is_quiet)
        check_nothing_is_held(world)


async def test_a_prfaas_host_that_is_gone_is_a_miss(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with sites(checkpoint, identities, tmp_path, known_to="r0") as world:
        only(world, "r1", "e0", "e1")
        await world.sites.pop("pool-x").kill()
        await until(lambda: not world.gateway.pools.is_live("pool-x"))
        assert await world.text(PROMPT) == await alone(checkpoint, tmp_path, PROMPT)
        record = await world.record()
        assert (record["path"], record["prefill_engine"], record["fallback"]) == (
            "remote",
            "r1",
            None,
        )
        assert record["cached_tokens"] == 0
