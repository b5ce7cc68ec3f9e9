"""Blocks of a pool that proved wrong leave the pool, and stay away."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.core.cache.keep_rules import Origin, Scope
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.transfer_state import LINK_FAULTS, TransferEnd
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.disk_segments import ALIGN_BYTES, SegmentFiles
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.disk_writer import DiskLimits
from prfaas.pool.store.origins import LOCAL, computed, received
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.gateway import Evicted, TransferEnded
from prfaas.wire.messages.link import Refused
from tests.orders import purge_end
from tests.pool.conftest import World
from tests.pool.mirror import Owner
from tests.pool.purges import (
    AFTER,
    OWN,
    RECEIVED,
    SOURCE,
    ask,
    decode_name,
    end,
    forget_memory,
    on_disk,
    origins,
    ship,
    store,
    undated,
)
from tests.pool.sites import LAYOUT, PROMPT, content, offer, source, subscribe, until


async def test_a_block_knows_where_it_came_from_and_so_does_its_copy_on_disk(
    world: World, tmp_path: Path
) -> None:
    _, pd, prefill, decode = await world.two_sites(disk=tmp_path / "disk", disk_bytes=1 << 20)
    transfer = await ship(prefill, pd)
    assert await store(decode, OWN)
    assert await store(decode, AFTER, SOURCE)
    came = received(SOURCE, transfer, is_inherited=False)
    expected = dict.fromkeys(PROMPT, came)
    expected |= {key: computed(decode_name(pd), frozenset()) for key in OWN}
    expected |= {key: computed(decode_name(pd), frozenset({SOURCE})) for key in AFTER}
    assert undated(pd) == expected
    assert len({id(origins(pd)[key]) for key in PROMPT}) <= 2, "one object for all of a transfer"
    await on_disk(pd)
    forget_memory(pd)
    assert undated(pd) == expected
    # Back in memory it says the same.
    assert await decode.load(PROMPT[:2]) == [True, True]
    block = pd.node.store.get(LAYOUT.layout_id, PROMPT[0])
    assert block is not None
    assert replace(block.origin, born_s=0) == came


async def test_engines_hear_where_the_blocks_they_load_came_from(world: World) -> None:
    _, pd, prefill, decode = await world.two_sites()
    await ship(prefill, pd)
    await store(decode, OWN)
    for keys, sources in ((OWN, []), (PROMPT[:2] + OWN, [SOURCE])):
        await decode.load(keys)
        assert decode.done[decode._next_job].sources == sources


@pytest.mark.parametrize("tier", ["memory", "disk", "both"])
async def test_a_purge_drops_what_came_and_what_was_computed_from_it(
    world: World, tmp_path: Path, tier: str
) -> None:
    folder = tmp_path / "disk"
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    await store(decode, OWN)
    await store(decode, AFTER, SOURCE)
    if tier != "memory":
        await on_disk(pd)
    if tier == "disk":
        forget_memory(pd)
    gone = {*PROMPT, *AFTER}
    counted = await ask(gateway, job=1, is_dry=True)
    assert pd.held() == gone | set(OWN)
    purged = await ask(gateway, job=2)
    assert counted.num_blocks == purged.num_blocks == len(gone)
    size = sum(len(content(key)) for key in gone)
    assert purged.host_bytes == (0 if tier == "disk" else size)
    assert purged.disk_bytes == (0 if tier == "memory" else size)
    assert purged.problem == ""
    assert pd.held() == set(OWN)
    assert pd.metric("pool_blocks_dropped_total", reason="purged") == len(gone)

    def told() -> set[BlockKey]:
        events = [m for m in gateway.messages if isinstance(m, Evicted)]
        return {key for event in events for key in keys_of(event.keys)}

    await until(lambda: told() == gone)
    # Asked again it has nothing to do; taken again is what comes after its end.
    assert (await ask(gateway, job=3)).num_blocks == 0
    gateway.channel.send(purge_end(job=9, source=SOURCE))
    await until(lambda: pd.node.store.rules.may_keep(received(SOURCE, b"", is_inherited=False)))
    transfer = prefill.push()
    prefill.push_done(transfer, rest=PROMPT)
    await until(lambda: set(PROMPT) < pd.held())
    gateway.channel.close("done")


async def test_nobody_finds_a_purged_block_that_is_pinned_or_leased(world: World) -> None:
    _, pd, prefill, decode = await world.two_sites()
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    store_ = pd.node.store
    block = store_.get(LAYOUT.layout_id, PROMPT[0])
    assert block is not None
    block.pins += 1
    assert store_.order.num_leased > 0
    await ask(gateway)
    assert store_.order.num_leased == 0
    assert await decode.look_up(PROMPT) == [0] * len(PROMPT)
    assert bytes(block.data) == content(PROMPT[0]), "who reads it may finish"
    block.pins -= 1
    del block
    assert store_.room.used_bytes == 0
    await until(lambda: not store_.room.arena.used_bytes)
    gateway.channel.close("done")


async def test_while_a_purge_lasts_nothing_of_its_source_is_taken(world: World) -> None:
    prfaas, pd, prefill, decode = await world.two_sites()
    gateway = await subscribe(pd, world.identities)
    await ask(gateway)
    assert not await store(decode, AFTER, SOURCE)
    assert await store(decode, OWN)
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("tickets_refused_total", end="destination", reason="purging"))
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="refused") == 1)
    assert pd.held() == set(OWN)
    gateway.channel.send(purge_end(job=9, source=SOURCE))
    assert [m for m in gateway.messages if isinstance(m, Refused)] == []
    gateway.channel.close("done")


async def test_a_gateway_learns_that_a_bar_did_not_last(world: World) -> None:
    """A pool node that was started anew knows of no purge, and has taken blocks since."""
    pd = await world.start_pd()
    gateway = await subscribe(pd, world.identities)
    await ask(gateway)
    assert await end(gateway)
    await ask(gateway)
    await pd.kill()
    pd = await world.start_pd()
    gateway = await subscribe(pd, world.identities)
    assert not await end(gateway)
    gateway.channel.close("done")


async def test_a_bar_that_nobody_ends_ends_by_itself(world: World) -> None:
    pd = await world.start_pd(purge_bar_ns=0)
    gateway, engine = await subscribe(pd, world.identities), await world.engine("pd-pool")
    await ask(gateway)
    gateway.channel.close("the gateway died")
    await until(lambda: not pd.node.store.rules.orders)
    assert await store(engine, AFTER, SOURCE)


async def test_open_transfers_from_the_source_end(world: World) -> None:
    pd = await world.start_pd()
    peer, gateway = await source(pd, world.identities), await subscribe(pd, world.identities)
    peer.channel.send(offer(world.identities, b"n" * 16))
    await until(lambda: pd.node.inbound.known.num_open == 1)
    purged = await ask(gateway)
    assert purged.num_transfers == 1
    assert pd.node.inbound.known.num_open == 0
    assert pd.metric("transfers_total", **RECEIVED, state="aborted") == 1
    for channel in (peer.channel, gateway.channel):
        channel.close("done")


async def test_a_pool_that_is_the_source_drops_all_it_holds(world: World) -> None:
    prfaas = await world.start(SOURCE, peers={})
    gateway, engine = await subscribe(prfaas, world.identities), await world.engine(SOURCE)
    assert await store(engine, PROMPT)
    assert (await ask(gateway)).num_blocks == len(PROMPT)
    assert prfaas.held() == set()
    assert not await store(engine, PROMPT)
    gateway.channel.close("done")


async def test_a_push_of_what_is_barred_ends_as_purged_and_counts_against_no_link(
    world: World,
) -> None:
    prfaas, _, prefill, _ = await world.two_sites()
    gateway = await subscribe(prfaas, world.identities)
    await ask(gateway)
    assert not await prefill.store(PROMPT, prefill.push())

    def ends() -> list[TransferEnd]:
        return [m.kind for m in gateway.messages if isinstance(m, TransferEnded)]

    await until(ends)
    assert ends() == [TransferEnd.PURGED]
    assert TransferEnd.PURGED not in LINK_FAULTS
    gateway.channel.close("done")


async def test_what_a_pool_has_of_another_goes_with_that_one_too(world: World) -> None:
    """The third pool: blocks that were sent on."""
    prfaas, pd, prefill, _ = await world.two_sites()
    gateway = await subscribe(pd, world.identities)
    assert await store(prefill, PROMPT[:4], "a-third-pool")
    assert await store(prefill, PROMPT[4:8])
    transfer = prefill.push()
    prefill.push_done(transfer, rest=PROMPT[:8])
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == 1)
    assert (await ask(gateway, source="a-third-pool")).num_blocks == 4
    assert pd.held() == set(PROMPT[4:8])
    assert len(prfaas.held()) == 8
    gateway.channel.close("done")


async def test_a_purge_looks_at_what_it_may_concern_and_lets_others_work(
    tmp_path: Path,
) -> None:
    """Of 4,000 blocks on disk 1,000 are of the source, in a quarter of the segments."""
    limits = DiskLimits(segment_bytes=400 * ALIGN_BYTES, slice_blocks=64)
    tier = DiskTier(SegmentFiles(tmp_path), 1 << 25, PoolMetrics(), Owner(), limits)
    running = asyncio.create_task(tier.run())
    await until(lambda: tier.is_ready)
    theirs = received(SOURCE, b"t" * 16, is_inherited=False)
    for number in range(4000):
        name = (LAYOUT.layout_id, BlockKey(0, number.to_bytes(32, "big")))
        origin = theirs if 1000 <= number < 2000 else LOCAL
        block = StoredBlock(memoryview(bytearray(100)), bytes(32), origin)
        await until(lambda: tier.offer(name, block, lambda: None))  # noqa: B023
    await until(lambda: len(tier) == 4000)

    num_asked = most = since_turn = 0

    class Counting(Scope):
        """Counts how often it is asked."""

        def covers(self, origin: Origin, pool: str) -> bool:
            nonlocal num_asked, most, since_turn
            num_asked, since_turn = num_asked + 1, since_turn + 1
            most = max(most, since_turn)
            return super().covers(origin, pool)

    async def other_work() -> None:
        nonlocal since_turn
        while True:
            since_turn = 0
            await asyncio.sleep(0)

    working = asyncio.create_task(other_work())
    scope = Counting(SOURCE)
    found, _ = await tier.count(scope)
    assert len(found) == 1000
    assert num_asked <= 2000
    assert most <= 128
    await tier.drop(scope)
    assert len(tier) == 3000
    for task in (working, running):
        task.cancel()
    await asyncio.gather(working, running, return_exceptions=True)
    tier.validate()
    await tier.close()
