"""A PD site with a tier in a bucket: what one pool node stored, any later one has."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from prfaas.pool.shared.s3_tier import S3Tier
from tests.pool.sites import Site, until
from tests.s3.faulty import Fault
from tests.s3.fixtures import Bucket

from .deployment import World, alone
from .site_of_hosts import settled, site_of
from .tier_faults import under_load
from .worlds import DENSE_PLAN, PLAN

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(300))
"""Its blocks reach to 288 tokens."""
DEADLINE_S = 4.0
BUSY_S = 30.0


def shared_blocks(site: Site) -> int:
    assert site.node.store_room.shared is not None
    return len(site.node.store_room.shared)


async def fill(bucket: Bucket, place: Path, checkpoint: Path, identities: Path, plan: str) -> str:
    """Have a pool node compute and store the prompt, and end; return the answer."""
    layout = {"pool-a": {"e0": "both"}}
    async with site_of(
        place, checkpoint, identities, layout, plan_text=plan, shared=bucket.settings
    ) as world:
        text = await world.text(PROMPT)
        await settled(world)
        site = world.sites["pool-a"]
        await until(lambda: shared_blocks(site) == len(site.node.store))
    return text


async def cached(world: World) -> tuple[str, int]:
    reply = await world.complete(PROMPT)
    tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return str(reply["choices"][0]["text"]), tokens


@pytest.mark.parametrize("plan", [PLAN, DENSE_PLAN], ids=["hybrid", "dense"])
@pytest.mark.parametrize("pool", ["pool-a", "pool-b"])
async def test_an_empty_pool_node_hits_what_is_in_the_bucket(
    checkpoint: Path, identities: Path, tmp_path: Path, bucket: Bucket, pool: str, plan: str
) -> None:
    """The node that wrote it, restarted, or a new one."""
    first = await fill(bucket, tmp_path, checkpoint, identities, plan)
    layout = {pool: {"e1": "both"}}
    async with site_of(
        tmp_path, checkpoint, identities, layout, plan_text=plan, shared=bucket.settings
    ) as world:
        site = world.sites[pool]
        assert len(site.node.store) == 0
        await until(
            lambda: (
                isinstance(site.node.store_room.shared, S3Tier)
                and site.node.store_room.shared.is_listed
            )
        )
        await until(lambda: world.gateway.index.num_blocks(pool) == shared_blocks(site) > 0)
        text, tokens = await cached(world)
        assert (text, tokens) == (first, 288)
        assert text == await alone(checkpoint, tmp_path, PROMPT)
        assert world.instance("e1").counts.external_hit_tokens == 288
        assert site.metric("pool_hits_total", tier="shared") > 0
        assert (await world.record())["fallback"] is None


async def test_two_hosts_of_a_gateway_use_one_bucket_at_once(
    checkpoint: Path, identities: Path, tmp_path: Path, bucket: Bucket
) -> None:
    """Prefill on one host, decode on the other, and what both lose from memory both find again."""
    prompts = [[n, *PROMPT] for n in range(4)]
    layout = {"pool-a": {"e0": "both"}, "pool-b": {"e1": "both"}}
    async with site_of(tmp_path, checkpoint, identities, layout, shared=bucket.settings) as world:
        sites = world.sites.values()
        first = await asyncio.gather(*(world.text(prompt) for prompt in prompts))
        await until(world.is_quiet)
        everything = {name for site in sites for name in site.node.store.in_memory()}
        await until(lambda: all(shared_blocks(site) == len(everything) for site in sites))
        num_objects = len(await bucket.objects())
        for _ in range(2):
            world.forget()
            for site in sites:
                site.node.store.drop(set(site.node.store.in_memory()))
            texts = await asyncio.gather(*(world.text(prompt) for prompt in prompts))
            assert texts == first
        assert first[0] == await alone(checkpoint, tmp_path, prompts[0])
        assert sum(site.metric("pool_hits_total", tier="shared") for site in sites) > 0
        await until(world.is_quiet)
        assert len(await bucket.objects()) == num_objects, "nothing is written twice"


@pytest.mark.parametrize("fault", list(Fault))
async def test_a_bucket_that_fails_costs_a_client_only_time(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    bucket: Bucket,
    fault: Fault,
) -> None:
    first = await fill(bucket, tmp_path, checkpoint, identities, PLAN)
    timing = bucket.timed(write_s=DEADLINE_S)
    limited = bucket.changed(deadline_ns=int(DEADLINE_S * 1e9), timing=timing)
    layout = {"pool-b": {"e1": "both"}}
    async with site_of(tmp_path, checkpoint, identities, layout, shared=limited) as world:
        site = world.sites["pool-b"]
        await until(lambda: world.gateway.index.num_blocks("pool-b") > 0)
        bucket.s3.fault = fault
        began_s = time.monotonic()
        for _ in range(3):
            text, tokens = await cached(world)
            assert text == first
            assert tokens <= 288, "what it has computed meanwhile"
            world.forget()
        assert time.monotonic() - began_s < DEADLINE_S + BUSY_S, "one deadline, not one a request"
        assert site.metric("pool_hits_total", tier="shared") == 0
        bucket.s3.fault = None


@pytest.mark.parametrize("fault", [Fault.ERRORS, Fault.BLACKHOLE, Fault.ALTERED])
async def test_clients_of_two_hosts_notice_a_bucket_that_fails_under_load_by_time_alone(
    checkpoint: Path, identities: Path, tmp_path: Path, bucket: Bucket, fault: Fault
) -> None:
    """A short run of `python -m benchmarks.pool.shared_tier clients`."""
    limited = bucket.changed(deadline_ns=int(DEADLINE_S * 1e9))
    layout = {"pool-a": {"e0": "both"}, "pool-b": {"e1": "both"}}
    async with site_of(tmp_path, checkpoint, identities, layout, shared=limited) as world:

        def inject() -> None:
            bucket.s3.fault = fault

        out = await under_load(world, inject, 4.0)
        bucket.s3.fault = None
    assert (out.num_wrong, out.errors) == (0, [])
    assert out.num_hits > 0
    longest_s = out.slowest_s(-4.0, -0.1) + DEADLINE_S + BUSY_S
    assert out.slowest_s(-0.1, 4.0) < longest_s, "one deadline, not one a request"
    # An altered block is a miss, and no reason to close the tier.
    assert fault is Fault.ALTERED or out.closed_s is not None
