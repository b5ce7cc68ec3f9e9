"""Two pool nodes of a site, and what they keep for each other in an S3 bucket."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.errors import ConfigError
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.shared.packs import name_in
from prfaas.wire.messages.engine import HIT, MISS
from prfaas.wire.messages.gateway import Evicted, Stored
from tests.pool.conftest import World
from tests.pool.purges import ask, store
from tests.pool.shared_sites import OTHER, all_written, loads_right, num_keys, start, stop, tier_of
from tests.pool.sites import HASHES, LAYOUT, PROMPT, content, subscribe, until
from tests.s3.faulty import Fault
from tests.s3.fixtures import Bucket, new_key

pytestmark = pytest.mark.timeout(300)
KEYS = [BlockKey(0, block_hash) for block_hash in HASHES[300:332]]


async def test_a_new_node_finds_what_another_one_stored(world: World, bucket: Bucket) -> None:
    first = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    await all_written(first, len(PROMPT))

    second = await start(world, bucket.settings, OTHER)
    watch = await subscribe(second, world.identities)
    other = await world.engine(OTHER)
    assert await other.look_up(PROMPT) == [HIT] * len(PROMPT), "the first look-up waits for a list"
    assert await loads_right(other, PROMPT) == [True] * len(PROMPT)
    assert second.metric("pool_hits_total", tier="shared") == len(PROMPT)
    assert second.metric("pool_blocks", tier="shared") == len(PROMPT)
    await until(lambda: num_keys(watch, Stored) == len(PROMPT))
    assert not watch.of(Evicted)
    watch.channel.close("done")


async def test_a_restarted_node_finds_what_it_stored(world: World, bucket: Bucket) -> None:
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    await stop(world, site, engine)  # What waits is written before it ends.
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert len(site.node.store) == 0
    assert await engine.look_up(PROMPT) == [HIT] * len(PROMPT)
    assert await loads_right(engine, PROMPT) == [True] * len(PROMPT)


async def test_a_node_follows_what_another_one_writes(world: World, bucket: Bucket) -> None:
    first, second = await start(world, bucket.settings), await start(world, bucket.settings, OTHER)
    engine, other = await world.engine("pd-pool"), await world.engine(OTHER)
    await until(lambda: tier_of(second).is_listed)
    assert await other.look_up(PROMPT) == [MISS] * len(PROMPT)
    assert await engine.store(PROMPT)
    await all_written(second, len(PROMPT))
    assert await loads_right(other, PROMPT) == [True] * len(PROMPT)
    assert await other.store(PROMPT)
    objects = await bucket.objects()
    assert {name.writer for path in objects if (name := name_in(path))} == {"pd-pool"}
    assert first.metric("pool_used_bytes", tier="shared") == sum(objects.values())


async def test_the_bucket_shows_neither_blocks_nor_their_names(
    world: World, bucket: Bucket
) -> None:
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    await all_written(site, len(PROMPT))
    for path in await bucket.objects():
        name, data = name_in(path), await bucket.data(path)
        assert name is not None
        assert name.layout_id == LAYOUT.layout_id
        for key in PROMPT:
            assert content(key)[:16] not in data
            assert key.block_hash[:8] not in data
            assert key.block_hash.hex()[:16] not in path


async def test_old_packs_are_read_after_a_rotation_of_the_key(
    world: World, bucket: Bucket, tmp_path: Path
) -> None:
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    await stop(world, site, engine)
    old = bucket.settings.keys.read_text()
    bucket.settings.keys.write_text(f"# since today\n{new_key()}\n{old}")
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.look_up(PROMPT) == [HIT] * len(PROMPT)
    assert await engine.store(KEYS)
    await all_written(site, len(PROMPT) + len(KEYS))
    heads = {(await bucket.data(path))[5:13] for path in await bucket.objects()}
    assert heads == set(load_keys(bucket.settings.keys).keys)


async def test_packs_of_an_unknown_key_are_misses_and_counted(
    world: World, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    await stop(world, site, engine)
    bucket.settings.keys.write_text(new_key())
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.look_up(PROMPT) == [MISS] * len(PROMPT)
    await until(lambda: tier_of(site).is_listed)
    num_packs = len(await bucket.objects())
    assert site.metric("pool_shared_unreadable_total", reason="unknown_key") == num_packs
    assert "is not in the file of keys" in caplog.text
    assert site.metric("pool_shared_up") == 1, "other packs can be read"


async def test_a_node_deletes_its_own_oldest_packs_beyond_its_limit(
    world: World, bucket: Bucket
) -> None:
    other = await start(world, bucket.settings, OTHER)
    engine = await world.engine(OTHER)
    assert await engine.store(KEYS)
    await all_written(other, len(KEYS))
    theirs = await bucket.objects()

    site = await start(world, bucket.changed(limit_bytes=2000))
    engine = await world.engine("pd-pool")
    for n in range(8):
        assert await engine.store([BlockKey(0, h) for h in HASHES[8 * n : 8 * n + 8]])
        await asyncio.sleep(0)
        await until(lambda: not tier_of(site).writing_bytes)
    await until(lambda: 0 < tier_of(site).used_bytes <= 2000)
    left = await bucket.objects()
    assert theirs.items() <= left.items(), "what another node wrote stays"
    assert sum(left.values()) <= 2000 + sum(theirs.values())
    newest = [BlockKey(0, h) for h in HASHES[56:64]]
    names = {key for _, key in tier_of(site).names()}
    assert set(newest) <= names
    assert not {BlockKey(0, h) for h in HASHES[:8]} & names
    assert site.held() == {*KEYS} | {BlockKey(0, h) for h in HASHES[:64]}


async def test_what_the_bucket_does_not_take_in_time_is_dropped_and_counted(
    world: World, bucket: Bucket
) -> None:
    bucket.s3.fault, bucket.s3.methods = Fault.BLACKHOLE, frozenset({"PUT"})
    site = await start(world, bucket.changed(pack_bytes=512, timing=bucket.timed(write_s=0.2)))
    engine = await world.engine("pd-pool")
    for n in range(8):
        assert await engine.store([BlockKey(0, h) for h in HASHES[32 * n : 32 * n + 32]])
        assert tier_of(site).writing_bytes <= 4 * 512
    assert len(site.node.store) == 256, "engines are served as before"

    def dropped() -> float:
        reasons = ("shared_full", "shared_write", "shared_down")
        return sum(site.metric("pool_blocks_dropped_total", reason=reason) for reason in reasons)

    await until(lambda: dropped() == 256)
    assert site.metric("pool_blocks_dropped_total", reason="shared_full") > 0
    assert site.metric("pool_shared_up") == 1, "blocks that are there can be read"
    assert not tier_of(site).writing_bytes


async def test_a_purge_deletes_packs_with_blocks_of_the_source(
    world: World, bucket: Bucket
) -> None:
    first, second = await start(world, bucket.settings), await start(world, bucket.settings, OTHER)
    engine, other = await world.engine("pd-pool"), await world.engine(OTHER)
    assert await store(engine, KEYS[:8], "bad-pool")
    await all_written(second, 8)
    assert await engine.store(KEYS[8:16])
    await all_written(second, 16)
    assert await loads_right(other, KEYS[:16]) == [True] * 16
    gateway = await subscribe(second, world.identities)
    num_bytes = sum(len(content(key)) for key in KEYS[:8])
    dry = await ask(gateway, source="bad-pool", is_dry=True)
    assert (dry.num_blocks, dry.shared_bytes) == (8, num_bytes)
    answer = await ask(gateway, 2, source="bad-pool")
    assert (answer.num_blocks, answer.shared_bytes, answer.problem) == (8, num_bytes, "")
    assert await other.look_up(KEYS[:16]) == [MISS] * 8 + [HIT] * 8
    assert len(await bucket.objects()) == 1
    # Nothing of the pack comes back: the other node notices that it is gone.
    await until(lambda: len(tier_of(first)) == 8)
    gateway.channel.close("done")


async def test_a_purge_of_a_node_concerns_what_others_have_of_it(
    world: World, bucket: Bucket
) -> None:
    await start(world, bucket.settings)
    second = await start(world, bucket.settings, OTHER)
    engine, other = await world.engine("pd-pool"), await world.engine(OTHER)
    assert await engine.store(KEYS)
    await all_written(second, len(KEYS))
    assert await loads_right(other, KEYS) == [True] * len(KEYS)
    gateway = await subscribe(second, world.identities)
    assert (await ask(gateway, source="pd-pool")).num_blocks == len(KEYS)
    assert await other.look_up(KEYS) == [MISS] * len(KEYS)
    assert not await bucket.objects()
    gateway.channel.close("done")


async def test_blocks_are_read_from_disk_before_the_bucket(
    world: World, bucket: Bucket, tmp_path: Path
) -> None:
    """Disk and bucket below a memory of half the blocks. The disk lacks those that memory has."""
    disk: dict[str, Any] = {
        "memory_bytes": 16 * 128,
        "disk": tmp_path / "disk",
        "disk_bytes": 1 << 20,
    }
    site = await start(world, bucket.settings, **disk)
    await until(lambda: site.node.disk is not None and site.node.disk.is_ready)
    watch = await subscribe(site, world.identities)
    engine = await world.engine("pd-pool")
    for key in KEYS:
        assert await engine.store([key])
        await until(lambda: not site.node.store.room.is_writing)
    await all_written(site, len(KEYS))
    await until(lambda: num_keys(watch, Stored) == len(KEYS))
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    hits = {t: site.metric("pool_hits_total", tier=t) for t in ("host", "disk", "shared")}
    assert sum(hits.values()) == len(KEYS)
    assert hits["disk"] > hits["shared"]
    assert not watch.of(Evicted), "a block in any tier can be found"
    watch.channel.close("done")

    await stop(world, site, engine)
    shutil.rmtree(tmp_path / "disk")
    site = await start(world, bucket.settings, **disk)
    engine = await world.engine("pd-pool")
    await all_written(site, len(KEYS))
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    assert site.metric("pool_hits_total", tier="shared") == len(KEYS)
    bucket.s3.fault = Fault.ERRORS
    came = await loads_right(engine, KEYS)
    assert any(came), "from memory and disk alone"


async def test_only_packs_of_layouts_in_use_are_read(world: World, bucket: Bucket) -> None:
    first = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    await all_written(first, len(PROMPT))
    second = await start(world, bucket.settings, OTHER)
    await until(lambda: tier_of(second).is_listed)
    assert len(tier_of(second)) == 0
    await world.engine(OTHER)
    await all_written(second, len(PROMPT))


async def test_objects_of_others_are_ignored_and_kept(world: World, bucket: Bucket) -> None:
    layout = LAYOUT.layout_id.hex()
    strange = ["notes.txt", f"{layout}/x", f"{layout}/{'0' * 12}_pd-pool_{'0' * 16}_fffffff"]
    forged = f"{layout}/{'0' * 12}_pd-pool_{'0' * 16}_80"
    for path in [*strange, forged]:
        await bucket.direct.write(path, b"x" * 200, 60)
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    await all_written(site, len(PROMPT))
    await until(lambda: tier_of(site).is_listed)
    assert site.metric("pool_shared_unreadable_total", reason="altered") == 1
    assert {*strange, forged} < (await bucket.objects()).keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "openssl rand -base64 32"),
        ("", "has 0 keys"),
        ("c2hvcnQ=", "line 1"),
        ("# a comment\n\nnot base64!", "line 3"),
    ],
)
def test_a_file_without_keys_is_refused_in_words(
    tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / "site.keys"
    if text is not None:
        file.write_text(text)
        file.chmod(0o600)
    with pytest.raises(ConfigError, match=words) as caught:
        load_keys(file)
    assert str(file) in str(caught.value)
    assert "c2hvcnQ" not in str(caught.value)


def test_a_file_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "site.keys"
    file.write_text(new_key())
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="lets everybody read it"):
        load_keys(file)
