"""Real pool nodes, ended by `kill -9`: what the disk had acknowledged is back, and whole."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.store.disk_segments import ALIGN_BYTES, SegmentFiles
from tests.pool.killed_node import KEYS, SPILLED, Killed


@pytest.fixture
async def node(identities: Path, tmp_path: Path) -> AsyncIterator[Killed]:
    made = Killed(identities, tmp_path)
    await made.start()
    yield made
    await made.kill()
    await asyncio.to_thread(made.engine.close)


def on_disk(folder: Path) -> set[BlockKey]:
    files = SegmentFiles(folder)
    try:
        found = [files.scan(segment.number).records for segment in files.found()]
    finally:
        files.close()
    return {key for records in found for (_, key), _ in records}


async def test_every_acknowledged_block_is_back(node: Killed) -> None:
    """Killed while it writes, three times."""
    known: set[BlockKey] = set()
    for turn in range(3):
        storing = asyncio.create_task(node.store(KEYS[turn * 100 : (turn + 1) * 100]))
        acknowledged = await node.until_metric(SPILLED, 40)
        await node.kill()
        storing.cancel()
        await asyncio.gather(storing, return_exceptions=True)
        written = on_disk(node.disk)
        assert len(written) >= len(known) + acknowledged
        assert written >= known
        await node.start()
        assert await node.found() == written
        known = written


async def test_a_half_written_record_is_dropped_and_counted(node: Killed) -> None:
    await node.store(KEYS)
    await node.until_metric(SPILLED, 40)
    await node.kill()
    written = on_disk(node.disk)
    record = node.segments[0].read_bytes()[: ALIGN_BYTES // 2]
    with node.segments[-1].open("r+b") as file:
        file.seek(0, 2)
        file.write(record[:170])
    await node.start()
    assert await node.found() == written
    metrics = await node.metrics()
    assert metrics['prfaas_pool_blocks_dropped_total{reason="disk_torn"}'] == 1


async def test_a_truncated_file_costs_what_was_cut_off(node: Killed) -> None:
    await node.store(KEYS)
    await node.until_metric(SPILLED, 40)
    await node.kill()
    written = on_disk(node.disk)
    with node.segments[-1].open("r+b") as file:
        file.truncate(node.segments[-1].stat().st_size - 2 * ALIGN_BYTES + 150)
    await node.start()
    found = await node.found()
    assert found < written
    assert len(found) == len(written) - 2
    metrics = await node.metrics()
    assert metrics['prfaas_pool_blocks_dropped_total{reason="disk_torn"}'] == 1


@pytest.mark.parametrize(("at", "reason"), [(20, "disk_torn"), (150, "disk_digest")])
async def test_a_flipped_byte_costs_its_block(node: Killed, at: int, reason: str) -> None:
    await node.store(KEYS)
    await node.until_metric(SPILLED, 40)
    await node.kill()
    written = on_disk(node.disk)
    with node.segments[0].open("r+b") as file:
        file.seek(3 * ALIGN_BYTES + at)
        (byte,) = file.read(1)
        file.seek(3 * ALIGN_BYTES + at)
        file.write(bytes([byte ^ 0x10]))
    await node.start()
    found = await node.found()
    assert found < written
    assert len(found) == len(written) - 1
    metrics = await node.metrics()
    assert metrics[f'prfaas_pool_blocks_dropped_total{{reason="{reason}"}}'] == 1
