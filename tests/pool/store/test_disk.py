"""A pool node with a disk below its memory."""

import asyncio
import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.errors import ConfigError
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.disk_segments import ALIGN_BYTES, DiskPlace, SegmentFiles
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.disk_writer import DiskLimits
from prfaas.pool.store.tier_ports import ReadBudget, StoredBlock
from prfaas.wire.messages.engine import HIT, MISS, Load
from prfaas.wire.messages.fields import keys_of, wire_keys
from prfaas.wire.messages.gateway import Evicted, PoolState, Stored, TierUse
from prfaas.wire.messages.link import Missing
from tests.pool.asked_pulls import a_pull
from tests.pool.conftest import World
from tests.pool.mirror import Owner
from tests.pool.sites import (
    LAYOUT,
    LOOPBACK,
    NUM_ROWS,
    PROMPT,
    Engine,
    Site,
    content,
    subscribe,
    until,
)

KEYS = [BlockKey(0, n.to_bytes(32, "big")) for n in range(64)]
MEMORY = 16 * 128
"""A quarter of them."""
DISK = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


async def start_pd(world: World, folder: Path, **settings: object) -> Site:
    site = await world.start_pd(
        **{"memory_bytes": MEMORY, "disk": folder, "disk_bytes": DISK} | settings
    )
    await until(lambda: site.node.disk is not None and site.node.disk.is_ready)
    return site


async def store_all(site: Site, engine: Engine, keys: list[BlockKey] = KEYS) -> None:
    """Store blocks, and give the disk time to follow."""
    for key in keys:
        assert await engine.store([key])
        await until(lambda: not site.node.store.room.is_writing)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in segments(folder))


def on_disk(site: Site) -> set[BlockKey]:
    assert site.node.disk is not None
    return {key for _, key in site.node.disk.names()}


def dropped(site: Site, reason: str) -> float:
    return site.metric("pool_blocks_dropped_total", reason=reason)


async def loads_right(engine: Engine, keys: list[BlockKey]) -> list[bool]:
    """Load blocks in turns; whether each came, and came as it was."""
    came: list[bool] = []
    for start in range(0, len(keys), 8):
        part = keys[start : start + 8]
        loaded = await engine.load(part)
        for row, (key, is_loaded) in enumerate(zip(part, loaded, strict=True)):
            assert not is_loaded or engine.row(row, key.group) == content(key)
        came += loaded
    return came


async def test_what_memory_evicts_is_found_on_disk(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    watch = await subscribe(pd, world.identities)
    await store_all(pd, engine)
    assert pd.held() == set(KEYS)
    assert len(pd.node.store) == 16
    assert pd.node.store.room.used_bytes == MEMORY
    assert dropped(pd, "not_spilled") == 0
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    assert pd.metric("pool_hits_total", tier="disk") >= 48
    assert pd.metric("pool_blocks_promoted_total") >= 48
    assert pd.node.store.room.used_bytes <= MEMORY
    await until(lambda: len(watch.of(Stored)) == len(KEYS))
    assert not watch.of(Evicted), "a block that moves between tiers is there all the time"
    watch.channel.close("done")


async def test_a_block_used_again_is_not_written_again(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    for _ in range(3):
        await loads_right(engine, KEYS)
        await until(lambda: not pd.node.store.room.is_writing)
    assert pd.metric("pool_blocks_spilled_total") == len(on_disk(pd)) <= len(KEYS)


async def test_gateways_hear_what_the_disk_holds(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    watch = await subscribe(pd, world.identities)
    await store_all(pd, await world.engine("pd-pool"))
    disk = pd.node.disk
    assert disk is not None

    def told() -> dict[str, TierUse]:
        states = [message for message in watch.messages if isinstance(message, PoolState)]
        return states[-1].tiers if states else {}

    def expected() -> TierUse:
        return TierUse(used_bytes=disk.used_bytes, capacity_bytes=DISK, num_blocks=len(disk))

    await until(lambda: len(disk) > 0 and told().get("disk") == expected())
    watch.channel.close("done")


async def test_everything_on_disk_is_back_after_a_restart(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    kept = on_disk(pd)
    assert len(kept) >= 48
    await pd.kill()
    pd = await start_pd(world, folder)
    assert pd.held() == kept
    watch = await subscribe(pd, world.identities)
    await engine.connected()
    came = await loads_right(engine, KEYS)
    assert {key for key, is_there in zip(KEYS, came, strict=True) if is_there} == kept
    watch.channel.close("done")


async def test_the_files_stay_under_their_limit(world: World, folder: Path) -> None:
    limit = 16 * ALIGN_BYTES
    pd = await start_pd(world, folder, disk_bytes=limit)
    engine = await world.engine("pd-pool")
    watch = await subscribe(pd, world.identities)
    for key in KEYS:
        await store_all(pd, engine, [key])
        assert file_bytes(folder) <= limit
    assert 14 <= len(on_disk(pd)) <= 16
    held = pd.held()
    assert await engine.look_up(KEYS) == [HIT if key in held else MISS for key in KEYS]
    there: set[BlockKey] = set()

    def follow() -> bool:
        there.clear()
        for message in watch.messages:
            if isinstance(message, Stored):
                there.update(keys_of(message.keys))
            elif isinstance(message, Evicted):
                there.difference_update(keys_of(message.keys))
        return there == held

    await until(follow)
    assert any(await loads_right(engine, sorted(held)))
    watch.channel.close("done")


async def test_a_segment_that_is_used_outlives_the_others(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder, disk_bytes=16 * ALIGN_BYTES)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine, KEYS[:24])
    oldest = min(on_disk(pd))
    for key in KEYS[24:]:
        await store_all(pd, engine, [key])
        assert await loads_right(engine, [oldest]) == [True]


async def test_a_lower_limit_drops_the_oldest_at_start(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder, disk_bytes=64 * ALIGN_BYTES)
    await store_all(pd, await world.engine("pd-pool"))
    await pd.kill()
    pd = await start_pd(world, folder, disk_bytes=16 * ALIGN_BYTES)
    assert 8 <= len(pd.held()) <= 16
    assert file_bytes(folder) <= 16 * ALIGN_BYTES


async def test_blocks_that_come_over_the_link_are_spilled_too(world: World, folder: Path) -> None:
    _, pd, prefill, decode = await world.two_sites(
        memory_bytes=MEMORY, disk=folder, disk_bytes=DISK
    )
    for key in KEYS:
        transfer = prefill.push(bytes_max=1024)
        assert await prefill.store([key], transfer)
        prefill.push_done(transfer)
        await until(lambda key=key: key in pd.held() and not pd.node.store.room.is_writing)  # type: ignore[misc]
    assert pd.held() == set(KEYS)
    assert await loads_right(decode, KEYS) == [True] * len(KEYS)


async def test_a_push_takes_blocks_from_disk(world: World, folder: Path) -> None:
    """More of them than memory has room for: those that were sent make room for the next."""
    pd = await world.start_pd()
    prfaas = await world.start("prfaas-pool", memory_bytes=MEMORY, disk=folder, disk_bytes=DISK)
    await world.linked(prfaas, pd)
    prefill, decode = await world.engine("prfaas-pool"), await world.engine("pd-pool")
    await store_all(prfaas, prefill)
    transfer = prefill.push()
    prefill.push_done(transfer, rest=KEYS)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert pd.held() == set(KEYS)
    assert await loads_right(decode, KEYS) == [True] * len(KEYS)


async def test_an_engine_that_leaves_ends_what_is_read_for_it(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    load = Load(job=engine.job(), keys=wire_keys(KEYS[:32]), rows=list(range(32)))
    before = pd.metric("pool_blocks_promoted_total")
    assert engine.send(load)
    await until(lambda: pd.metric("pool_blocks_promoted_total") > before)
    world.engines.remove(engine)
    await asyncio.to_thread(engine.close)
    another = await world.engine("pd-pool")
    assert await loads_right(another, KEYS) == [True] * len(KEYS)


async def test_a_load_into_a_row_that_is_not_there_is_refused(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    assert engine.send(Load(job=engine.job(), keys=wire_keys(KEYS[:1]), rows=[NUM_ROWS]))
    await until(lambda: not engine.client.is_connected)
    await engine.connected()
    assert await loads_right(engine, KEYS[:1]) == [True]


async def test_an_error_that_nobody_expects_ends_the_connection_and_no_more(
    world: World, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request without an answer would hold up all later ones of the engine."""
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    tier = pd.node.disk
    assert tier is not None
    read = tier.read
    tier.read = broken  # type: ignore[method-assign]
    assert not any(await engine.load(KEYS[:8]))
    tier.read = read  # type: ignore[method-assign]
    await engine.connected()
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    assert "ValueError: not expected" in caplog.text


async def broken(name: BlockName, into: memoryview, budget: ReadBudget) -> bytes | None:
    raise ValueError("not expected")


async def test_a_flipped_byte_costs_one_block_and_is_counted(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    await pd.kill()
    path = segments(folder)[0]
    with path.open("r+b") as file:
        file.seek(ALIGN_BYTES + 200)
        (byte,) = file.read(1)
        file.seek(ALIGN_BYTES + 200)
        file.write(bytes([byte ^ 1]))
    pd = await start_pd(world, folder)
    watch = await subscribe(pd, world.identities)
    await engine.connected()
    held = sorted(pd.held())
    came = await loads_right(engine, held)
    broken = [key for key, is_there in zip(held, came, strict=True) if not is_there]
    assert len(broken) == 1
    assert dropped(pd, "disk_digest") == 1
    assert pd.held() == set(held) - set(broken)
    await until(lambda: bool(watch.of(Evicted)))
    assert await engine.look_up(broken) == [MISS]
    await store_all(pd, engine, broken)
    assert await loads_right(engine, broken) == [True]
    watch.channel.close("done")


@contextlib.contextmanager
def no_more_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses longer files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_fails_costs_blocks_and_nothing_else(
    world: World, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await start_pd(world, folder, disk_limits=DiskLimits(retry_s=3600.0))
    engine = await world.engine("pd-pool")
    await store_all(pd, engine, KEYS[:32])
    kept = on_disk(pd)
    with no_more_than(0):
        for key in KEYS[32:48]:
            assert await engine.store([key])
        await until(lambda: pd.metric("pool_disk_up") == 0)
    assert "cannot be written: File too large; blocks are kept only in memory" in caplog.text
    assert pd.node.store.room.used_bytes <= MEMORY
    assert await loads_right(engine, sorted(kept)) == [True] * len(kept)


async def test_a_disk_that_failed_is_tried_again(
    world: World, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await start_pd(world, folder, disk_limits=DiskLimits(retry_s=0.01))
    engine = await world.engine("pd-pool")
    with no_more_than(0):
        await engine.store(KEYS[:32])
        await until(lambda: "cannot be written" in caplog.text)
    await until(lambda: pd.metric("pool_disk_up") == 1)
    while not on_disk(pd):  # The first ones may leave memory before the next try.
        for key in KEYS:
            assert await engine.store([key])


async def test_retries_of_a_disk_that_fails_leave_no_empty_files(
    world: World, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await start_pd(world, folder, disk_limits=DiskLimits(retry_s=0.01))
    engine = await world.engine("pd-pool")
    with no_more_than(0):
        for key in KEYS[:32]:
            assert await engine.store([key])
        await until(lambda: caplog.text.count("cannot be written") >= 3)
        assert len(segments(folder)) <= 1, "one may be begun"


async def test_a_full_disk_that_fails_loses_one_segment_however_often_it_is_tried(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is made before it is known that the write fails; it serves all later attempts."""
    limits = DiskLimits(retry_s=0.0)
    gone: list[BlockName] = []
    tier = DiskTier(SegmentFiles(folder), DISK, PoolMetrics(), Owner(gone), limits)
    running = asyncio.create_task(tier.run())
    await until(lambda: tier.is_ready)

    async def write(number: int, size: int) -> None:
        done = asyncio.Event()
        name = (LAYOUT.layout_id, BlockKey(0, number.to_bytes(32, "big")))
        block = StoredBlock(memoryview(bytearray(size)), bytes(32))
        await until(lambda: tier.offer(name, block, done.set))
        await done.wait()

    number = 0
    while not gone:
        await write(number := number + 1, 3000)
    assert tier.used_bytes > DISK - DISK // 8
    num_segments = len(tier._index.segments)
    gone.clear()

    def fail(*_: object) -> DiskPlace:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(SegmentFiles, "append", fail)
    for size in (3000, 9000, 1, 5000) * 10:
        await write(number := number + 1, size)
    assert len(tier._index.segments) >= num_segments - 1
    assert len(gone) <= DISK // 8 // 3000
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    tier.validate()
    await tier.close()


async def test_a_disk_that_fails_at_start_leaves_the_node_with_memory(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    await pd.kill()

    def fail(_: SegmentFiles, number: int) -> None:
        raise OSError(errno.EIO, f"segment {number} cannot be deleted")

    monkeypatch.setattr(SegmentFiles, "remove", fail)
    pd = await world.start_pd(memory_bytes=MEMORY, disk=folder, disk_bytes=DISK // 16)
    await until(lambda: "blocks are kept only in memory" in caplog.text)
    await until(lambda: engine.client.is_connected)
    assert pd.metric("pool_disk_up") == 0
    assert await engine.store(KEYS[:4])
    assert await loads_right(engine, KEYS[:4]) == [True] * 4


async def test_a_segment_that_vanishes_is_a_miss(world: World, folder: Path) -> None:
    pd = await start_pd(world, folder)
    engine = await world.engine("pd-pool")
    await store_all(pd, engine)
    for path in segments(folder):
        path.unlink()
    in_memory = {key for key in KEYS if (LAYOUT.layout_id, key) in pd.node.store.in_memory()}
    came = await loads_right(engine, sorted(set(KEYS) - in_memory))
    assert not any(came)
    assert pd.held() == in_memory


async def test_two_nodes_can_not_share_a_folder(world: World, folder: Path) -> None:
    await start_pd(world, folder)
    with pytest.raises(ConfigError, match="another pool node uses"):
        await world.start("prfaas-pool", disk=folder, disk_bytes=DISK, listen=(LOOPBACK, 0))


async def test_a_limit_below_one_block_is_refused(world: World, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"limited to 1\.0 KiB; give it at least 32\.0 KiB"):
        await world.start("prfaas-pool", disk=folder, disk_bytes=1024)


async def test_a_node_that_did_not_start_leaves_the_folder(world: World, folder: Path) -> None:
    pd = await world.start_pd()
    with pytest.raises(ConfigError, match=str(pd.port)):
        await world.start("prfaas-pool", disk=folder, disk_bytes=DISK, listen=(LOOPBACK, pd.port))
    SegmentFiles(folder).close()


async def test_a_pull_takes_blocks_from_disk_and_tells_what_is_missing(
    world: World, folder: Path
) -> None:
    pd = await world.start_pd()
    prfaas = await world.start("prfaas-pool", memory_bytes=MEMORY, disk=folder, disk_bytes=DISK)
    await world.linked(prfaas, pd)
    prefill, decode = await world.engine("prfaas-pool"), await world.engine("pd-pool")
    await store_all(prfaas, prefill)
    gateway = await subscribe(pd, world.identities)
    gateway.channel.send(a_pull(world, [*KEYS, PROMPT[-1]]))
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert pd.held() == set(KEYS)
    await until(lambda: bool(gateway.of(Missing)))
    [told] = gateway.of(Missing)
    assert isinstance(told, Missing)
    assert keys_of(told.keys) == [PROMPT[-1]]
    assert await loads_right(decode, KEYS) == [True] * len(KEYS)
    gateway.channel.close("done")
