"""Blocks that are too old are neither served nor kept, in memory, on disk and in a bucket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prfaas.core.cache.eviction import GRAIN_S
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.tenant_salts import tag_in, tenant_tag
from prfaas.pool.node.keeping import KeptTier
from prfaas.wire.messages.engine import HIT, MISS
from prfaas.wire.messages.gateway import Evicted, SnapshotEnd, Subscribe
from tests.pool.conftest import World
from tests.pool.purges import forget_memory, on_disk, ship
from tests.pool.shared_sites import OTHER, all_written, num_keys, start, stop
from tests.pool.sites import LAYOUT, PROMPT, Peer, Site, dial, until
from tests.s3.fixtures import Bucket

MORTAL, LASTING = tenant_tag("mortal"), tenant_tag("lasting")
LIMIT_S = 3600


class Clock:
    """Unix time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def keys(first: int, last: int) -> list[BlockKey]:
    return [BlockKey(0, number.to_bytes(32, "big")) for number in range(first, last)]


BY_HAND_S = 1e6
"""No round but those that a test asks for."""
OLD, OTHERS = keys(300, 308), keys(310, 314)


async def told(site: Site, world: World, ages: dict[str, int]) -> Peer:
    """A gateway whose maximum ages the pool node knows."""
    gateway = await dial(site, world.identities, "gateway")
    gateway.channel.send(Subscribe(gateway="gateway", ages=ages))
    await until(lambda: gateway.of(SnapshotEnd))
    return gateway


async def test_old_blocks_are_removed_by_a_node_of_itself(world: World) -> None:
    clock = Clock()
    pd = await world.start_pd(wall_s=clock, age_round_s=0.01)
    engine = await world.engine("pd-pool")
    gateway = await told(pd, world, {MORTAL: LIMIT_S})
    assert await engine.store(OLD, tenant=MORTAL)
    clock.now_s += LIMIT_S
    await until(lambda: not pd.held())
    assert pd.metric("pool_blocks_dropped_total", reason="too_old") == len(OLD)
    gateway.channel.close("done")


async def aged(site: Site, tier: KeptTier | None = None) -> int:
    """Inspect the next blocks of a tier, by default memory; return how many were too old."""
    tiers = site.node.keeping.tiers
    return await tiers.expire_next(tier or tiers.all[0])


async def test_an_old_block_is_missed_at_once_and_removed_in_its_turn(world: World) -> None:
    clock = Clock()
    pd = await world.start_pd(wall_s=clock, age_round_s=BY_HAND_S)
    engine = await world.engine("pd-pool")
    gateway = await told(pd, world, {MORTAL: LIMIT_S})
    assert await engine.store(OLD, tenant=MORTAL)
    assert await engine.store(OTHERS, tenant=LASTING)
    clock.now_s += LIMIT_S - GRAIN_S - 1
    assert await engine.look_up(OLD) == [HIT] * len(OLD)
    clock.now_s += GRAIN_S + 1
    assert await engine.look_up(OLD) == [MISS] * len(OLD)
    assert await engine.load(OLD[:2]) == [False, False]
    assert await engine.look_up(OTHERS) == [HIT] * len(OTHERS)
    await aged(pd)
    assert pd.held() == set(OTHERS)
    await until(lambda: num_keys(gateway, Evicted) >= len(OLD))
    assert {key for m in gateway.messages if isinstance(m, Evicted) for _, key in m.keys} == {
        key.block_hash for key in OLD
    }
    # Computed anew, it is young.
    assert await engine.store(OLD, tenant=MORTAL)
    assert await engine.look_up(OLD) == [HIT] * len(OLD)
    gateway.channel.close("done")


async def test_without_a_limit_no_block_is_too_old(world: World) -> None:
    clock = Clock()
    pd = await world.start_pd(wall_s=clock, age_round_s=BY_HAND_S)
    engine = await world.engine("pd-pool")
    gateway = await told(pd, world, {MORTAL: LIMIT_S})
    assert await engine.store(OLD, tenant=LASTING)
    clock.now_s += 1000 * LIMIT_S
    assert await aged(pd) == 0
    assert await engine.look_up(OLD) == [HIT] * len(OLD)
    gateway.channel.close("done")


async def test_the_default_is_for_all_others_also_of_an_unknown_tenant(world: World) -> None:
    clock = Clock()
    pd = await world.start_pd(wall_s=clock, age_round_s=BY_HAND_S)
    engine = await world.engine("pd-pool")
    gateway = await told(pd, world, {"": LIMIT_S, LASTING: 10 * LIMIT_S})
    assert await engine.store(OLD)
    assert await engine.store(OTHERS, tenant=LASTING)
    clock.now_s += LIMIT_S
    assert await engine.look_up([*OLD, *OTHERS]) == [MISS] * len(OLD) + [HIT] * len(OTHERS)
    gateway.channel.close("done")


async def test_a_round_inspects_a_bounded_number_of_blocks(world: World) -> None:
    clock = Clock()
    pd = await world.start_pd(wall_s=clock, age_round_s=BY_HAND_S)
    engine = await world.engine("pd-pool")
    gateway = await told(pd, world, {MORTAL: LIMIT_S})
    assert await engine.store(OLD, tenant=MORTAL)
    clock.now_s += LIMIT_S
    pd.node.keeping.tiers.slice_blocks = 3
    assert [await aged(pd) for _ in range(3)] == [3, 3, 2]
    gateway.channel.close("done")


@pytest.mark.parametrize("is_limited", [True, False])
async def test_blocks_on_disk_keep_their_age_across_a_restart(
    world: World, tmp_path: Path, is_limited: bool
) -> None:
    clock, folder = Clock(), tmp_path / "disk"
    settings = {"disk": folder, "disk_bytes": 1 << 20, "wall_s": clock}
    pd = await world.start_pd(**settings)
    engine = await world.engine("pd-pool")
    ages = {MORTAL: LIMIT_S} if is_limited else {}
    await told(pd, world, ages)
    assert await engine.store(OTHERS, tenant=LASTING)
    assert await engine.store(OLD, tenant=MORTAL)
    await on_disk(pd)
    world.engines.remove(engine)
    await asyncio.to_thread(engine.close)
    await pd.kill()
    clock.now_s += LIMIT_S

    pd = await world.start_pd(**settings)
    engine = await world.engine("pd-pool")
    disk = pd.node.disk
    assert disk is not None
    await until(lambda: disk.is_ready)
    num_files = len(list(folder.glob("*.seg")))
    await told(pd, world, ages)
    assert await engine.look_up(OTHERS) == [HIT] * len(OTHERS)
    assert await engine.look_up(OLD) == [MISS if is_limited else HIT] * len(OLD)
    await aged(pd, disk)
    assert pd.held() == ({*OTHERS} if is_limited else {*OTHERS, *OLD})
    assert len(list(folder.glob("*.seg"))) == num_files - is_limited


async def test_a_copy_at_another_pool_node_is_as_old_as_its_original(world: World) -> None:
    clock = Clock()
    pd = await world.start_pd(wall_s=clock, age_round_s=BY_HAND_S)
    prfaas = await world.start("prfaas-pool", wall_s=clock)
    await world.linked(prfaas, pd)
    prefill, decode = await world.engine("prfaas-pool"), await world.engine("pd-pool")
    assert await prefill.store(PROMPT)
    clock.now_s += LIMIT_S - 600
    await ship(prefill, pd)
    origin = pd.node.store.origin_of((LAYOUT.layout_id, PROMPT[0]))
    assert origin is not None
    assert LIMIT_S - 600 <= clock.now_s - origin.born_s <= LIMIT_S - 600 + 4 * GRAIN_S
    tag = origin.tenant
    assert tag == tag_in(tag)
    gateway = await told(pd, world, {tag: LIMIT_S})
    assert await decode.look_up(PROMPT[:8]) == [HIT] * 8
    clock.now_s += 600  # The copy is 600 s old; its block is older than the limit.
    assert await decode.look_up(PROMPT[:8]) == [MISS] * 8
    gateway.channel.close("done")


async def test_a_gateway_sets_no_age_of_tags_that_are_not_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    pd = await world.start_pd(wall_s=clock, age_round_s=BY_HAND_S)
    engine = await world.engine("pd-pool")
    monkeypatch.setattr(pd.node.sites, "claims", lambda _, tag: tag == LASTING)
    gateway = await told(pd, world, {MORTAL: 1, "": 1, LASTING: 2 * LIMIT_S})
    assert await engine.store(OLD, tenant=MORTAL)
    clock.now_s += LIMIT_S
    assert await engine.look_up(OLD) == [HIT] * len(OLD)
    gateway.channel.close("done")


@pytest.mark.timeout(300)
async def test_old_blocks_leave_the_bucket(world: World, bucket: Bucket) -> None:
    clock = Clock()
    pd = await start(world, bucket.settings, wall_s=clock)
    engine = await world.engine("pd-pool")
    gateway = await told(pd, world, {MORTAL: LIMIT_S})
    assert await engine.store(OLD, tenant=MORTAL)
    await all_written(pd, len(OLD))
    objects = len(await bucket.objects())
    other = await start(world, bucket.settings, OTHER, wall_s=clock)
    reader = await world.engine(OTHER)
    await told(other, world, {MORTAL: LIMIT_S})
    assert await reader.look_up(OLD) == [HIT] * len(OLD)
    clock.now_s += LIMIT_S
    assert await reader.look_up(OLD) == [MISS] * len(OLD)
    assert await engine.look_up(OLD) == [MISS] * len(OLD)
    assert await aged(pd, pd.node.store_room.shared) == len(OLD)
    assert len(await bucket.objects()) == objects - 1
    forget_memory(pd)
    assert pd.held() == set()
    gateway.channel.close("done")
    await stop(world, other, reader)
