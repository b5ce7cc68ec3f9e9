"""Real pool nodes, ended by `kill -9`: what the disk had acknowledged is back, and whole."""

import asyncio
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.store.disk_segments import ALIGN_BYTES, SegmentFiles
from prfaas.wire.messages.engine import HIT
from tests.ports import free_port

from .sites import LOOPBACK, Engine, content, until

KEYS = [BlockKey(n % 2, n.to_bytes(32, "big")) for n in range(400)]
MEMORY = "4KiB"
"""Of 37 KiB."""
SPILLED = "prfaas_pool_blocks_spilled_total"


@dataclass
class Killed:
    """A pool node in a process of its own, and an engine that stays."""

    identities: Path
    folder: Path
    process: asyncio.subprocess.Process | None = None
    admin: int = 0
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine("engine", self.folder / "pool.sock", self.identities)

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def segments(self) -> list[Path]:
        return sorted(self.disk.glob("*.seg"))

    async def start(self) -> None:
        self.admin = free_port()
        command = ["-m", "prfaas", "pool", "--name", "pd-pool", "--memory", MEMORY]
        command += ["--listen", f"{LOOPBACK}:0", "--admin", f"{LOOPBACK}:{self.admin}"]
        command += ["--socket", str(self.folder / "pool.sock"), "--gateway", "gateway"]
        command += ["--identities", str(self.identities)]
        command += ["--disk", str(self.disk), "--disk-limit", "16MiB"]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stderr=asyncio.subprocess.DEVNULL
        )
        await self.engine.connected()
        await self.until_metric("prfaas_pool_disk_up", 1)

    async def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()
            await until(lambda: not self.engine.client.is_connected)

    async def metrics(self) -> dict[str, float]:
        def read() -> str:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.admin}/metrics") as reply:
                text: str = reply.read().decode()
                return text

        lines = (await asyncio.to_thread(read)).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def until_metric(self, name: str, least: float) -> float:
        while (value := (await self.metrics()).get(name, 0.0)) < least:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.005)
        return value

    async def store(self, keys: list[BlockKey]) -> None:
        for start in range(0, len(keys), 4):
            assert await self.engine.store(keys[start : start + 4])

    async def found(self) -> set[BlockKey]:
        """Blocks that lookups find; each is loaded and compared."""
        answers = await self.engine.look_up(KEYS)
        keys = [key for key, answer in zip(KEYS, answers, strict=True) if answer == HIT]
        whole: set[BlockKey] = set()
        for start in range(0, len(keys), 4):
            part = keys[start : start + 4]
            for row, (key, came) in enumerate(zip(part, await self.engine.load(part), strict=True)):
                if came:
                    assert self.engine.row(row, key.group) == content(key)
                    whole.add(key)
        return whole


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
