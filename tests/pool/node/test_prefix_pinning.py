"""Pins of the blocks of one prompt: they stay in memory, within a limit and for a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.core.cache.keep_rules import ORDERS_MAX, Effect
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.pool.node.pinning import PIN_RATIO
from prfaas.units import NS_PER_S
from prfaas.wire.messages.gateway import Order, OrderDone
from tests.pool.conftest import World
from tests.pool.purges import forget_memory, on_disk
from tests.pool.sites import Engine, Peer, Site, subscribe, until

OWNER, OTHERS = tenant_tag("owner"), tenant_tag("others")
BLOCK_BYTES = 128
HOUR_NS = 3600 * NS_PER_S


def keys(first: int, last: int) -> list[BlockKey]:
    return [BlockKey(0, number.to_bytes(32, "big")) for number in range(first, last)]


PROMPT = keys(300, 304)


async def pin(
    gateway: Peer,
    job: int = 1,
    *,
    named: list[BlockKey] = PROMPT,
    tenant: str = OWNER,
    for_ns: int = HOUR_NS,
    is_dry: bool = False,
) -> OrderDone:
    hashes = b"".join(key.block_hash for key in named)
    message = Order(
        job=job, effect=Effect.PIN, hashes=hashes, tenant=tenant, for_ns=for_ns, is_dry=is_dry
    )
    gateway.channel.send(message)

    def answers() -> list[OrderDone]:
        return [m for m in gateway.messages if isinstance(m, OrderDone) and m.job == job]

    await until(answers)
    return answers()[0]


def in_memory(site: Site) -> set[BlockKey]:
    return {key for _, key in site.node.store.in_memory()}


def pinned(site: Site) -> set[BlockKey]:
    store = site.node.store
    return {name[1] for name in store.in_memory() if store.order.is_pinned(name)}


async def flood(engine: Engine, site: Site, *, tenant: str = OTHERS) -> None:
    """Store twice as many bytes as memory takes."""
    num_blocks = 2 * site.node.store.room.capacity_bytes // BLOCK_BYTES
    for first in range(1000, 1000 + num_blocks, 50):
        assert await engine.store(keys(first, first + 50), tenant=tenant)


async def test_a_flood_evicts_all_but_the_pinned_prompt_also_after_it_was_used(
    world: World,
) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    rest = keys(310, 314)
    assert await engine.store(PROMPT, tenant=OWNER)
    assert await engine.store(rest, tenant=OWNER)
    told = await pin(gateway)
    assert (told.num_blocks, told.num_bytes, told.num_left_out) == (4, 4 * BLOCK_BYTES, 0)
    assert pd.metric("pool_pinned_bytes") == 4 * BLOCK_BYTES
    assert await engine.load(PROMPT) == [True] * 4
    await flood(engine, pd)
    assert set(PROMPT) <= in_memory(pd)
    assert not in_memory(pd) & set(rest)
    assert (await pin(gateway, 2, for_ns=0)).problem == ""
    await flood(engine, pd)
    assert not in_memory(pd) & set(PROMPT)
    gateway.channel.close("done")


async def test_a_dry_run_counts_and_pins_nothing(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert await engine.store(PROMPT, tenant=OWNER)
    assert (await pin(gateway, is_dry=True)).num_blocks == 4
    assert pinned(pd) == set()
    gateway.channel.close("done")


async def test_blocks_of_another_tenant_are_not_pinned(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert await engine.store(PROMPT, tenant=OTHERS)
    assert (await pin(gateway)).num_blocks == 0
    assert pinned(pd) == set()
    gateway.channel.close("done")


async def test_blocks_on_disk_are_read_into_memory(world: World, tmp_path: Path) -> None:
    pd = await world.start_pd(disk=tmp_path / "disk", disk_bytes=1 << 20)
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert await engine.store(PROMPT, tenant=OWNER)
    await on_disk(pd)
    forget_memory(pd)
    assert (await pin(gateway)).num_blocks == 4
    assert pinned(pd) == set(PROMPT)
    gateway.channel.close("done")


async def test_a_repetition_takes_in_what_has_come_since(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert (await pin(gateway)).num_blocks == 0
    assert await engine.store(PROMPT, tenant=OWNER)
    assert (await pin(gateway, 2)).num_blocks == 4
    gateway.channel.close("done")


async def test_pins_hold_a_part_of_memory_at_most(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    limit = int(pd.node.store.room.capacity_bytes * PIN_RATIO) // BLOCK_BYTES
    many = keys(300, 300 + limit + 3)
    for first in range(0, len(many), 50):
        assert await engine.store(many[first : first + 50], tenant=OWNER)
    told = await pin(gateway, named=many)
    assert told.num_left_out >= 3
    assert told.num_blocks + told.num_left_out == len(many)
    assert pd.node.store.order.pinned_bytes <= pd.node.store.room.capacity_bytes * PIN_RATIO
    assert pinned(pd) == set(many[: told.num_blocks])
    gateway.channel.close("done")


async def test_a_pin_ends_with_its_time(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert await engine.store(PROMPT, tenant=OWNER)
    assert (await pin(gateway, for_ns=1)).num_blocks == 4
    await until(lambda: not pinned(pd))
    gateway.channel.close("done")


async def test_what_two_prompts_share_stays_pinned_when_one_pin_ends(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert await engine.store(PROMPT, tenant=OWNER)
    await pin(gateway)
    await pin(gateway, 2, named=PROMPT[:2])
    await pin(gateway, 3, for_ns=0)
    assert pinned(pd) == set(PROMPT[:2])
    gateway.channel.close("done")


async def test_more_pins_than_the_limit_are_refused(world: World) -> None:
    pd = await world.start_pd()
    gateway = await subscribe(pd, world.identities)
    for number in range(ORDERS_MAX[Effect.PIN]):
        assert (await pin(gateway, number + 1, named=keys(number, number + 1))).problem == ""
    told = await pin(gateway, 1000, named=keys(1000, 1001))
    assert "has 64 pins" in told.problem
    gateway.channel.close("done")


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_a_purged_prompt_is_not_pinned_any_more(world: World, *, is_pinned: bool) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert await engine.store(PROMPT, tenant=OWNER)
    if is_pinned:
        await pin(gateway)
    pd.node.store.drop([name for name in pd.node.store.in_memory() if name[1] in PROMPT])
    assert (pd.node.store.order.pinned_bytes, in_memory(pd) & set(PROMPT)) == (0, set())
    gateway.channel.close("done")
