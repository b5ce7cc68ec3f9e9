"""A tier in a Mooncake Store: what one pool node stored, others have, and nobody else can read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.shared.mooncake.orders import StoreOperation
from prfaas.pool.shared.mooncake.sealed_block import key_of
from prfaas.pool.shared.shown_blocks import ALTERED_MAX
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.messages.engine import HIT, MISS
from prfaas.wire.messages.gateway import Evicted, Stored
from tests.mooncake.fixtures import Mooncake
from tests.pool.conftest import World
from tests.pool.mooncake_sites import KEYS, connected, filled, mooncake_of
from tests.pool.purges import ask
from tests.pool.shared_sites import OTHER, loads_right, num_keys
from tests.pool.sites import HASHES, LAYOUT, Site, content, subscribe, until
from tests.s3.fixtures import new_key

pytestmark = pytest.mark.timeout(300)
LAYOUT_ID = LAYOUT.layout_id


async def raw(site: Site, operation: StoreOperation, *names: str, data: bytes = b"") -> list[int]:
    """Do something with the store that no tier does; the first half of the memory is used."""
    memory = mooncake_of(site)._memory
    offset = memory.writes.take(max(1, len(data)))
    assert offset is not None
    memory.view(offset, len(data))[:] = data
    codes = await mooncake_of(site).client.ask(operation, list(names), offset, len(data))
    memory.writes.give_back(offset, max(1, len(data)))
    return codes


async def stored(site: Site, name: str) -> bytes:
    """The object under a key."""
    memory = mooncake_of(site)._memory
    offset = memory.reads.take(1 << 20)
    assert offset is not None
    (length,) = await mooncake_of(site).client.ask(StoreOperation.GET, [name], offset, 1 << 20)
    memory.reads.give_back(offset, 1 << 20)
    return bytes(memory.view(offset, length))


def runs(process_id: int) -> bool:
    """Return True if there is such a process."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def path(mooncake: Mooncake, key: BlockKey) -> str:
    return key_of(mooncake.settings.prefix, (LAYOUT_ID, key))


async def test_a_new_node_finds_what_another_one_stored(world: World, mooncake: Mooncake) -> None:
    await filled(world, mooncake.settings)
    site, engine = await connected(world, mooncake.settings, OTHER)
    watch = await subscribe(site, world.identities)
    assert len(mooncake_of(site)) == 0, "nobody has asked"
    absent = BlockKey(0, HASHES[1])
    assert await engine.look_up([*KEYS, absent]) == [HIT] * len(KEYS) + [MISS]
    await until(lambda: num_keys(watch, Stored) == len(KEYS))
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    assert site.metric("pool_hits_total", tier="shared") == len(KEYS)
    watch.channel.close("done")


async def test_a_look_up_of_blocks_that_the_node_holds_asks_nobody(
    world: World, mooncake: Mooncake
) -> None:
    site, engine = await filled(world, mooncake.settings)
    assert not site.node.store.needs_probe(LAYOUT_ID, KEYS)
    assert site.node.store.needs_probe(LAYOUT_ID, [*KEYS, BlockKey(0, HASHES[1])])
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)


async def test_nothing_in_the_store_shows_a_block(world: World, mooncake: Mooncake) -> None:
    site, _ = await filled(world, mooncake.settings)
    data = await stored(site, path(mooncake, KEYS[0]))
    assert data.startswith(b"PFMB\x01")
    assert content(KEYS[0])[:16] not in data
    assert b"pd-pool" not in data


async def test_objects_that_are_altered_or_swapped_are_misses_and_counted(
    world: World, mooncake: Mooncake
) -> None:
    first, _ = await filled(world, mooncake.settings)
    good = await stored(first, path(mooncake, KEYS[0]))
    other = await stored(first, path(mooncake, KEYS[1]))
    middle = len(good) // 2
    altered = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    for key, data in zip(KEYS, (altered, good, good[:40], b"x", other[:-1]), strict=False):
        await raw(first, StoreOperation.REMOVE, f"^{path(mooncake, key)}$")
        assert await raw(first, StoreOperation.PUT, path(mooncake, key), data=data) == [0]
    site, engine = await connected(world, mooncake.settings, OTHER)
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)
    assert await loads_right(engine, KEYS) == [False] * 5 + [True] * (len(KEYS) - 5)
    assert site.metric("pool_shared_unreadable_total", reason="altered") == 5
    assert site.metric("pool_shared_up") == 1, "the store works"


async def test_a_store_whose_every_block_is_altered_is_closed(
    world: World, mooncake: Mooncake
) -> None:
    first, _ = await filled(world, mooncake.settings)
    assert len(KEYS) == ALTERED_MAX
    for key in KEYS:
        await raw(first, StoreOperation.REMOVE, f"^{path(mooncake, key)}$")
        assert await raw(first, StoreOperation.PUT, path(mooncake, key), data=b"x" * 64) == [0]
    site, engine = await connected(world, mooncake.settings, OTHER)
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert site.metric("pool_shared_up") == 0


async def test_a_node_without_the_key_has_misses_and_says_why(
    world: World, mooncake: Mooncake, tmp_path: Path
) -> None:
    await filled(world, mooncake.settings)
    keys = tmp_path / "other.keys"
    keys.write_text(f"{new_key()}\n")
    keys.chmod(0o600)
    site, engine = await connected(world, mooncake.changed(keys=keys), OTHER)
    await engine.look_up(KEYS)
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert site.metric("pool_shared_unreadable_total", reason="unknown_key") == len(KEYS)
    keys.write_text(f"{new_key()}\n{mooncake.settings.keys.read_text()}")
    rotated, engine = await connected(world, mooncake.changed(keys=keys), "pd-third")
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    assert rotated.metric("pool_shared_unreadable_total", reason="unknown_key") == 0


async def test_blocks_that_the_store_has_evicted_are_misses_and_gateways_are_told(
    world: World, mooncake: Mooncake
) -> None:
    await filled(world, mooncake.settings)
    site, engine = await connected(world, mooncake.settings, OTHER)
    watch = await subscribe(site, world.identities)
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)
    await raw(site, StoreOperation.REMOVE, f"^{mooncake.settings.prefix}/.*")
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert site.metric("pool_shared_up") == 1
    await until(lambda: num_keys(watch, Evicted) == len(KEYS))
    watch.channel.close("done")


async def test_what_the_store_does_not_take_in_time_is_dropped_and_counted(
    world: World, mooncake: Mooncake
) -> None:
    site, _ = await connected(world, mooncake.settings)
    tier = mooncake_of(site)
    block = StoredBlock(bytearray(1 << 20), bytes(32))
    taken = [
        tier.offer((LAYOUT_ID, BlockKey(0, bytes([n]) * 32)), block, lambda: None)
        for n in range(20)
    ]
    assert taken.count(True) == 8, "half of the buffer"
    assert site.metric("pool_blocks_dropped_total", reason="shared_full") == 12
    large = StoredBlock(bytearray(9 << 20), bytes(32))
    assert not tier.offer((LAYOUT_ID, BlockKey(0, b"L" * 32)), large, lambda: None)
    assert site.metric("pool_blocks_dropped_total", reason="shared_large") == 1

    def written(outcome: str) -> float:
        return site.metric("pool_shared_requests_total", operation="write", outcome=outcome)

    await until(lambda: written("ok") + written("failed") == 8)
    # The store may have no room: blocks of other tests are under leases. It may evict these, too.
    no_room = site.metric("pool_blocks_dropped_total", reason="shared_full") - 12
    assert len(tier) <= written("ok") - no_room
    assert site.metric("pool_blocks_dropped_total", reason="shared_write") == written("failed")
    assert tier.used_bytes == len(tier) << 20


async def test_a_purge_deletes_all_blocks_of_the_site_and_no_others(
    world: World, mooncake: Mooncake
) -> None:
    site, engine = await filled(world, mooncake.settings)
    assert await raw(site, StoreOperation.PUT, "of-others/a", data=b"x") == [0]
    other, other_engine = await connected(world, mooncake.settings, OTHER)
    assert await other_engine.look_up(KEYS) == [HIT] * len(KEYS)
    gateway = await subscribe(other, world.identities)
    answer = await ask(gateway, source="pd-pool")
    assert answer.problem == ""
    assert await other_engine.look_up(KEYS) == [MISS] * len(KEYS)
    names = [path(mooncake, KEYS[0]), "of-others/a"]
    assert await raw(other, StoreOperation.EXIST, *names) == [0, 1]
    del site, engine


async def test_a_node_that_stops_ends_its_client(world: World, mooncake: Mooncake) -> None:
    site, engine = await connected(world, mooncake.settings)
    process_id = mooncake_of(site).client.process_id
    assert process_id is not None
    assert runs(process_id)
    world.engines.remove(engine)
    await asyncio.to_thread(engine.close)
    await site.kill()
    assert not runs(process_id)
