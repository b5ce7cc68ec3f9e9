"""What came from a pool that proved wrong leaves memory and disk, and stays away."""

import asyncio
import struct
import threading
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.transfer_state import LINK_FAULTS, TransferEnd
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node import purging
from prfaas.pool.store import disk_tier as disk_module
from prfaas.pool.store import origins as origins_module
from prfaas.pool.store.disk_segments import ALIGN_BYTES, MAGIC_1, MARKER, SegmentFiles
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.origins import (
    LOCAL,
    ORIGIN_BYTES_MAX,
    UNKNOWN,
    Origin,
    computed,
    origin_bytes,
    origin_in,
    received,
)
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import block_digest
from prfaas.wire.messages.engine import Store
from prfaas.wire.messages.fields import SOURCES_MAX, keys_of, wire_keys
from prfaas.wire.messages.gateway import Evicted, Purge, Purged, PurgeEnd, PurgeEnded, TransferEnded
from prfaas.wire.messages.link import Refused

from .conftest import World
from .sites import LAYOUT, PROMPT, Engine, Peer, Site, content, offer, source, subscribe, until

SOURCE = "prfaas-pool"
OWN = [BlockKey(0, bytes([n]) * 32) for n in range(100, 104)]
"""What an engine at home computed from nothing that came from elsewhere."""
AFTER = [BlockKey(0, bytes([n]) * 32) for n in range(110, 114)]
"""What it computed from what came."""
RECEIVED = {"direction": "received"}


async def store(engine: Engine, keys: list[BlockKey], *sources: str) -> bool:
    message = Store(
        job=engine.job(), keys=wire_keys(keys), rows=engine.fill(keys), sources=list(sources)
    )
    return (await engine.finish(message)).ok


async def ship(prefill: Engine, pd: Site) -> bytes:
    before = pd.metric("transfers_total", **RECEIVED, state="committed")
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") > before)
    return transfer


async def ask(gateway: Peer, job: int = 1, **fields: Any) -> Purged:
    """Have a pool node purge; its answer."""
    asked: dict[str, Any] = {"job": job, "source": SOURCE} | fields
    gateway.channel.send(Purge(**asked))

    def answers() -> list[Purged]:
        return [m for m in gateway.messages if isinstance(m, Purged) and m.job == job]

    await until(answers)
    [answer] = answers()
    return answer


def origins(site: Site) -> dict[BlockKey, Origin]:
    held = {key: block.origin for (_, key), block in site.node.store._blocks.items()}
    if site.node.disk is not None:
        for _, key in site.node.disk.names():
            held.setdefault(key, site.node.disk.origin((LAYOUT.layout_id, key)))
    return held


async def on_disk(site: Site) -> None:
    """Have all that is in memory written to disk as well."""
    assert site.node.disk is not None
    disk = site.node.disk
    await until(lambda: disk.is_ready)
    for name, block in site.node.store._blocks.items():
        if name not in disk:
            block.pins += 1
            assert disk.offer(name, block, partial(unpin, block))
    await until(lambda: all(name in disk for name in site.node.store._blocks))


def unpin(block: StoredBlock) -> None:
    block.pins -= 1


def forget_memory(site: Site) -> None:
    for name in list(site.node.store._blocks):
        site.node.store.discard(*name)


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
    assert origins(pd) == expected
    assert len({id(origins(pd)[key]) for key in PROMPT}) == 1, "one object for all of a transfer"
    await on_disk(pd)
    forget_memory(pd)
    assert origins(pd) == expected
    # Back in memory it says the same.
    assert await decode.load(PROMPT[:2]) == [True, True]
    block = pd.node.store.get(LAYOUT.layout_id, PROMPT[0])
    assert block is not None
    assert block.origin == came


def decode_name(site: Site) -> str:
    [engine] = site.node._engines
    return engine


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
    gateway.channel.send(PurgeEnd(job=9, source=SOURCE))
    await until(lambda: not pd.node._purging.is_barred(received(SOURCE, b"", is_inherited=False)))
    transfer = prefill.push()
    prefill.push_done(transfer, rest=PROMPT)
    await until(lambda: set(PROMPT) < pd.held())
    gateway.channel.close("done")


async def restarted(world: World, pd: Site, folder: Path) -> Site:
    await pd.kill()
    again = await world.start_pd(disk=folder, disk_bytes=1 << 20)
    assert again.node.disk is not None
    disk = again.node.disk
    await until(lambda: disk.is_ready)
    return again


async def test_what_was_purged_from_disk_does_not_come_back_with_the_next_start(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    await store(decode, OWN)
    await on_disk(pd)
    assert (await ask(gateway)).problem == ""
    again = await restarted(world, pd, folder)
    assert again.held() == set(OWN)
    assert again.metric("pool_blocks_dropped_total", reason="disk_torn") == 0


async def test_a_purge_that_broke_off_is_finished_by_the_next(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    await store(decode, OWN)
    await on_disk(pd)
    with monkeypatch.context() as broken:
        broken.setattr(SegmentFiles, "erase", fails)
        assert "no space" in (await ask(gateway)).problem
    assert pd.held() == set(OWN)
    again = await restarted(world, pd, folder)
    assert again.held() == {*PROMPT, *OWN}
    gateway = await subscribe(again, world.identities)
    purged = await ask(gateway)
    assert (purged.num_blocks, purged.problem) == (len(PROMPT), "")
    assert again.held() == set(OWN)
    gateway.channel.close("done")


def fails(*_: object) -> None:
    raise OSError("no space left")


async def test_a_purge_that_could_not_mark_the_disk_does_so_when_asked_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    await store(decode, OWN)
    await on_disk(pd)
    with monkeypatch.context() as broken:
        broken.setattr(SegmentFiles, "erase", fails)
        assert "no space" in (await ask(gateway)).problem
        assert "no space" in (await ask(gateway, job=2)).problem
    assert (await ask(gateway, job=3)).problem == ""
    assert (await restarted(world, pd, folder)).held() == set(OWN)


async def test_a_purge_marks_records_that_could_not_be_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    await on_disk(pd)
    forget_memory(pd)
    with monkeypatch.context() as broken:
        broken.setattr(SegmentFiles, "read", fails)
        assert await decode.load(PROMPT[:1]) == [False]
    assert (await ask(gateway)).problem == ""
    assert (await restarted(world, pd, folder)).held() == set()


async def test_of_two_records_of_a_name_a_purge_marks_both(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    await ship(prefill, pd)
    await on_disk(pd)
    forget_memory(pd)
    with monkeypatch.context() as broken:
        broken.setattr(SegmentFiles, "read", fails)
        assert await decode.load(PROMPT[:1]) == [False]
    assert await store(decode, PROMPT[:1], SOURCE)
    await on_disk(pd)
    pd = await restarted(world, pd, folder)
    gateway = await subscribe(pd, world.identities)
    assert (await ask(gateway)).num_blocks == len(PROMPT)
    assert (await restarted(world, pd, folder)).held() == set()


async def test_a_read_that_outlasts_a_purge_brings_nothing_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    await on_disk(pd)
    forget_memory(pd)
    has_read, may_end, read = threading.Event(), threading.Event(), SegmentFiles.read

    def slow(*about: Any) -> bytes | None:
        digest = read(*about)
        has_read.set()
        may_end.wait(60)
        return digest

    monkeypatch.setattr(SegmentFiles, "read", slow)
    loading = asyncio.create_task(decode.load(PROMPT[:1]))
    await until(has_read.is_set)
    assert (await ask(gateway)).problem == ""
    gateway.channel.send(PurgeEnd(job=9, source=SOURCE))
    await until(lambda: not pd.node._purging._bars)
    may_end.set()
    assert await loading == [False]
    assert pd.held() == set()
    gateway.channel.close("done")


async def test_nobody_finds_a_purged_block_that_is_pinned_or_leased(world: World) -> None:
    _, pd, prefill, decode = await world.two_sites()
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    store_ = pd.node.store
    block = store_.get(LAYOUT.layout_id, PROMPT[0])
    assert block is not None
    block.pins += 1
    assert store_.num_leased > 0
    await ask(gateway)
    assert store_.num_leased == 0
    assert await decode.look_up(PROMPT) == [0] * len(PROMPT)
    assert bytes(block.data) == content(PROMPT[0]), "who reads it may finish"
    block.pins -= 1
    del block
    assert store_.used_bytes == 0
    await until(lambda: not store_.arena.used_bytes)
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
    gateway.channel.send(PurgeEnd(job=9, source=SOURCE))
    assert [m for m in gateway.messages if isinstance(m, Refused)] == []
    gateway.channel.close("done")


async def end(gateway: Peer) -> bool:
    """End a purge; return True if nothing of its source was taken until then."""
    gateway.channel.send(PurgeEnd(job=77, source=SOURCE))

    def answers() -> list[PurgeEnded]:
        return [m for m in gateway.messages if isinstance(m, PurgeEnded)]

    await until(answers)
    [answer] = answers()
    gateway.messages.clear()
    return answer.was_barred


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


async def test_a_bar_that_nobody_ends_ends_by_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "BAR_NS", 0)
    pd = await world.start_pd()
    gateway, engine = await subscribe(pd, world.identities), await world.engine("pd-pool")
    await ask(gateway)
    gateway.channel.close("the gateway died")
    await until(lambda: not pd.node._purging._bars)
    assert await store(engine, AFTER, SOURCE)


async def test_open_transfers_from_the_source_end(world: World) -> None:
    pd = await world.start_pd()
    peer, gateway = await source(pd, world.identities), await subscribe(pd, world.identities)
    peer.channel.send(offer(world.identities, b"n" * 16))
    await until(lambda: pd.node.inbound.num_open == 1)
    purged = await ask(gateway)
    assert purged.num_transfers == 1
    assert pd.node.inbound.num_open == 0
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


async def test_a_folder_of_format_1_is_read_and_purged(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    write_format_1(folder, OWN)
    pd = await world.start_pd(disk=folder, disk_bytes=1 << 20)
    assert pd.node.disk is not None
    disk = pd.node.disk
    await until(lambda: disk.is_ready)
    engine, gateway = await world.engine("pd-pool"), await subscribe(pd, world.identities)
    assert set(origins(pd).values()) == {UNKNOWN}
    assert await engine.load(OWN) == [True] * len(OWN)
    # Of blocks that were kept before origins were, nobody knows where they came from.
    assert (await ask(gateway)).num_blocks == len(OWN)
    again = await restarted(world, pd, folder)
    assert again.held() == set()
    assert (folder / MARKER).read_text() == "2\n"


def write_format_1(folder: Path, keys: list[BlockKey]) -> None:
    """One segment as versions before origins wrote it."""
    folder.mkdir(mode=0o700)
    (folder / MARKER).write_text("1\n")
    header = struct.Struct(">8s32sI32sQ32s")
    data = b""
    for key in keys:
        block = content(key)
        digest = block_digest(LAYOUT.layout_id, key, block)
        head = header.pack(MAGIC_1, LAYOUT.layout_id, key.group, key.block_hash, len(block), digest)
        record = head + blake3.blake3(head).digest(8) + block
        data += record + bytes(-len(record) % ALIGN_BYTES)
    (folder / f"{0:016d}.seg").write_bytes(data)


async def test_a_disk_that_is_still_read_says_that_it_is_not_done(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd = await world.start_pd(disk=tmp_path / "disk", disk_bytes=1 << 20)
    assert pd.node.disk is not None
    disk = pd.node.disk
    await until(lambda: disk.is_ready)
    monkeypatch.setattr(disk, "_is_ready", False)
    gateway = await subscribe(pd, world.identities)
    assert "still being read" in (await ask(gateway)).problem
    gateway.channel.close("done")
    await asyncio.sleep(0)


def test_an_origin_fits_its_record_and_reads_as_it_was_written() -> None:
    names = frozenset(f"{number}" * 64 for number in range(SOURCES_MAX))
    for origin in (Origin(names, "e" * 64, b"t" * 16), Origin(), UNKNOWN):
        assert origin_in(origin_bytes(origin)) == origin
    longest = Origin(names, "\N{GRINNING FACE}" * 64, b"t" * 16)
    assert len(origin_bytes(longest)) <= ORIGIN_BYTES_MAX
    assert computed("engine", names | {"one more"}).is_of("whoever")
    assert origin_in(b"\xc1") == UNKNOWN


async def test_a_purge_looks_at_what_it_may_concern_and_lets_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,000 blocks on disk 1,000 are of the source, in a quarter of the segments."""
    monkeypatch.setattr(origins_module, "SLICE", 64)
    monkeypatch.setattr(disk_module, "SEGMENT_BYTES", 400 * ALIGN_BYTES)
    tier = DiskTier(tmp_path, 1 << 25, PoolMetrics(), lambda _: None, lambda _: None)
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

    def matches(origin: Origin) -> bool:
        nonlocal num_asked, most, since_turn
        num_asked, since_turn = num_asked + 1, since_turn + 1
        most = max(most, since_turn)
        return origin.is_of(SOURCE)

    async def other_work() -> None:
        nonlocal since_turn
        while True:
            since_turn = 0
            await asyncio.sleep(0)

    working = asyncio.create_task(other_work())
    found, _ = await tier.drop(matches)
    assert len(found) == 1000
    assert len(tier) == 3000
    assert num_asked <= 2000
    assert most <= 128
    await tier.erase(matches)
    for task in (working, running):
        task.cancel()
    await asyncio.gather(working, running, return_exceptions=True)
    tier.close()
