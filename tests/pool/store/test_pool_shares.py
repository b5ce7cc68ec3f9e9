"""Shares of tenants in the memory and on the disk of a running pool node."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.tenant_salts import tag_in, tenant_tag
from prfaas.pool.store.disk_segments import ALIGN_BYTES
from prfaas.pool.store.disk_writer import DiskLimits
from prfaas.wire.messages.engine import Store
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import PoolState, SnapshotEnd
from tests.pool.conftest import World
from tests.pool.sites import Engine, Peer, Site, subscribe, until

QUIET, FLOOD = tenant_tag("quiet"), tenant_tag("flood")
MEMORY = 64 * 128
"""64 blocks."""


def keys(first: int, last: int) -> list[BlockKey]:
    return [BlockKey(0, number.to_bytes(32, "big")) for number in range(first, last)]


async def told(site: Site, identities: Path, shares: dict[str, tuple[float, float]]) -> Peer:
    """A gateway whose shares the pool node knows."""
    gateway = await subscribe(site, identities, shares)
    await until(lambda: gateway.of(SnapshotEnd))
    return gateway


async def store(engine: Engine, blocks: list[BlockKey], tenant: str) -> None:
    for start in range(0, len(blocks), 4):
        assert await engine.store(blocks[start : start + 4], tenant=tenant)


def tenants(gateway: Peer) -> dict[str, tuple[int, int]]:
    """Bytes by tag that a gateway was told last."""
    states = [message for message in gateway.messages if isinstance(message, PoolState)]
    last = states[-1].tenants if states else {}
    return {tag: (use.host_bytes, use.disk_bytes) for tag, use in last.items()}


async def test_a_flood_takes_no_block_of_another_tenants_reserve(world: World) -> None:
    pd = await world.start_pd(memory_bytes=MEMORY)
    engine = await world.engine("pd-pool")
    gateway = await told(pd, world.identities, {QUIET: (0.25, 1.0)})
    await store(engine, keys(0, 16), QUIET)
    await store(engine, keys(100, 420), FLOOD)
    assert set(keys(0, 16)) <= pd.held()
    assert len(pd.held()) == 64
    await until(lambda: tenants(gateway) == {QUIET: (16 * 128, 0), FLOOD: (48 * 128, 0)})


async def test_without_shares_a_flood_evicts_what_was_used_least_recently(world: World) -> None:
    pd = await world.start_pd(memory_bytes=MEMORY)
    engine = await world.engine("pd-pool")
    await told(pd, world.identities, {})
    await store(engine, keys(0, 16), QUIET)
    await store(engine, keys(100, 420), FLOOD)
    assert not set(keys(0, 16)) & pd.held()


async def test_a_tenant_holds_no_more_than_its_limit(world: World) -> None:
    pd = await world.start_pd(memory_bytes=MEMORY)
    engine = await world.engine("pd-pool")
    await told(pd, world.identities, {FLOOD: (0.0, 0.5)})
    await store(engine, keys(0, 16), QUIET)
    await store(engine, keys(100, 420), FLOOD)
    assert pd.node.store.room.held_bytes == {QUIET: 16 * 128, FLOOD: 32 * 128}
    assert set(keys(0, 16)) | set(keys(388, 420)) == pd.held()


async def test_shares_that_a_gateway_announces_later_apply_to_the_blocks_that_are_there(
    world: World,
) -> None:
    pd = await world.start_pd(memory_bytes=MEMORY)
    engine = await world.engine("pd-pool")
    await store(engine, keys(0, 16), QUIET)
    await told(pd, world.identities, {QUIET: (0.25, 1.0)})
    await store(engine, keys(100, 420), FLOOD)
    assert set(keys(0, 16)) <= pd.held()
    await told(pd, world.identities, {})
    await store(engine, keys(500, 820), FLOOD)
    assert not set(keys(0, 16)) & pd.held()


async def test_a_flood_takes_no_block_of_a_reserve_on_disk_also_after_a_restart(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    settings: dict[str, object] = {
        "memory_bytes": 16 * 128,
        "disk": folder,
        "disk_bytes": 64 * ALIGN_BYTES,
        "disk_limits": DiskLimits(segment_bytes=8 * ALIGN_BYTES),
    }
    shares = {QUIET: (0.25, 1.0)}
    pd = await world.start_pd(**settings)
    engine = await world.engine("pd-pool")
    await told(pd, world.identities, shares)
    await filled(pd, engine, 0, 24, QUIET)
    await filled(pd, engine, 100, 200, FLOOD)
    disk = pd.node.disk
    assert disk is not None
    kept = {key for _, key in disk.names()} & set(keys(0, 24))
    # The newest of its segments, within the reserve of 16 records.
    assert len(kept) == 16
    assert disk.used_bytes <= disk.capacity_bytes
    await pd.kill()
    await until(lambda: not engine.client.is_connected)
    pd = await world.start_pd(**settings)
    await until(lambda: pd.node.disk is not None and pd.node.disk.is_ready)
    await engine.connected()
    await told(pd, world.identities, shares)
    await filled(pd, engine, 500, 580, FLOOD)
    assert pd.node.disk is not None
    assert {key for _, key in pd.node.disk.names()} >= kept
    assert all(await engine.load(sorted(kept)))


async def filled(site: Site, engine: Engine, first: int, last: int, tenant: str) -> None:
    """Store blocks, and give the disk time to follow."""
    for key in keys(first, last):
        assert await engine.store([key], tenant=tenant)
        await until(lambda: not site.node.store.room.is_writing)


async def test_an_engine_that_names_no_tag_is_refused(world: World) -> None:
    """It could otherwise fill records on disk with any text."""
    pd = await world.start_pd(memory_bytes=MEMORY)
    engine = await world.engine("pd-pool")
    engine.send(Store(job=engine.job(), keys=wire_keys(keys(0, 1)), rows=[0], tenant="x" * 32))
    await until(lambda: not engine.client.is_connected)
    assert not pd.held()


@pytest.mark.parametrize("salt", ["a salt", "a salt.of-a-user", "a salt.of-another.user"])
def test_all_users_of_a_tenant_have_its_tag(salt: str) -> None:
    assert tenant_tag(salt) == tenant_tag("a salt") != tenant_tag("b salt")
    assert tag_in(tenant_tag(salt)) == tenant_tag(salt)
    assert tenant_tag(None) == tenant_tag("") == tag_in("prfaas") == ""
