"""A pool node in a process of its own, which tests end by `kill -9`."""

import asyncio
import signal
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.core.kv.blocks import BlockKey
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
    options: tuple[str, ...] = ()
    admin: int = 0
    port: int = 0
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
        self.admin, self.port = free_port(), free_port()
        command = ["-m", "prfaas", "pool", "--name", "pd-pool", "--memory", MEMORY]
        command += ["--listen", f"{LOOPBACK}:{self.port}", "--admin", f"{LOOPBACK}:{self.admin}"]
        command += ["--socket", str(self.folder / "pool.sock"), "--gateway", "gateway"]
        command += ["--identities", str(self.identities)]
        command += ["--disk", str(self.disk), "--disk-limit", "16MiB", *self.options]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stderr=asyncio.subprocess.DEVNULL
        )
        await self.engine.connected()
        await self.until_metric("prfaas_pool_disk_up", 1)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
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

    async def store(self, keys: list[BlockKey], tenant: str = "") -> None:
        for start in range(0, len(keys), 4):
            assert await self.engine.store(keys[start : start + 4], tenant=tenant)

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
