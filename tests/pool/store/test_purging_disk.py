"""Blocks of a pool that proved wrong leave the disk tier, whatever breaks meanwhile."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.cache.keep_rules import Origin
from prfaas.pool.store.disk_segments import SegmentFiles
from prfaas.pool.store.origins import ORIGIN_BYTES_MAX, UNKNOWN, computed, origin_bytes, origin_in
from prfaas.wire.messages.fields import SOURCES_MAX
from tests.orders import purge_end
from tests.pool.conftest import World
from tests.pool.purges import (
    OWN,
    SOURCE,
    ask,
    fails,
    forget_memory,
    on_disk,
    restarted,
    ship,
    store,
)
from tests.pool.sites import PROMPT, Peer, Site, subscribe, until


async def with_blocks_on_disk(world: World, folder: Path) -> tuple[Site, Peer]:
    """A PD site with blocks that came and blocks of its own on disk, and a gateway at its pool."""
    _, pd, prefill, decode = await world.two_sites(disk=folder, disk_bytes=1 << 20)
    gateway = await subscribe(pd, world.identities)
    await ship(prefill, pd)
    await store(decode, OWN)
    await on_disk(pd)
    return pd, gateway


async def test_what_was_purged_from_disk_does_not_come_back_with_the_next_start(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    pd, gateway = await with_blocks_on_disk(world, folder)
    assert (await ask(gateway)).problem == ""
    again = await restarted(world, pd, folder)
    assert again.held() == set(OWN)
    assert again.metric("pool_blocks_dropped_total", reason="disk_torn") == 0


async def test_a_purge_that_broke_off_is_finished_by_the_next(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    pd, gateway = await with_blocks_on_disk(world, folder)
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


async def test_a_purge_that_could_not_mark_the_disk_does_so_when_asked_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    pd, gateway = await with_blocks_on_disk(world, folder)
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
    gateway.channel.send(purge_end(job=9, source=SOURCE))
    await until(lambda: not pd.node.store.rules.orders)
    may_end.set()
    assert await loading == [False]
    assert pd.held() == set()
    gateway.channel.close("done")


async def test_a_disk_that_is_still_read_says_that_it_is_not_done(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd = await world.start_pd(disk=tmp_path / "disk", disk_bytes=1 << 20)
    assert pd.node.disk is not None
    disk = pd.node.disk
    await until(lambda: disk.is_ready)
    monkeypatch.setattr(disk._writer, "is_open", False)
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
