"""Throughput of other transfer engines over the same emulated link.

They speak no TLS, and take their congestion control from the host, so each is measured under two
host defaults: cubic, which stock hosts have, and BBR. They live in an environment of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.link.rows import Row
from tests.lab.wan import SIDES, Side, Wan

END = Path(__file__).with_name("end.py")
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
MIB = 1 << 20
REPEATS, ENOUGH_S = 3, 6.0
"""Transfers of a run; no further one is begun after so many seconds."""
TRANSFER_MAX_S = 15.0
"""A transfer that takes longer is cut, and what the link delivered until then is an upper bound."""
WARM_BYTES, WARM_BYTES_LOSSY = 64 * MIB, 2 * MIB
"""Carried twice before anything is timed. Cubic takes a minute for the larger one if there is loss,
and loses its window anyway."""


@dataclass(frozen=True)
class Engine:
    """A peer with its settings."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)


INSTALLED = [Engine("mooncake"), Engine("nixl", {"UCX_TLS": "tcp"})]
TUNED = [
    Engine("mooncake", {"MC_TCP_LANES_PER_PEER": "16", "MC_TCP_SLICE_SIZE": str(MIB)}),
    Engine("nixl", {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "8m", "UCX_TCP_RCVBUF": "8m"}),
]
"""The settings under which each is fastest on these links, of those tried. Mooncake: 4, 8 and 16
lanes, slices of 64 KiB and 1 MiB. NIXL: socket buffers left alone, 8 MiB and 16 MiB."""


@dataclass(frozen=True)
class PeerRun:
    """Medians of one engine on one link.

    Attributes:
        name: Of the engine.
        rate: Bits of blocks a second.
        is_bound: The transfer was cut, and `rate` is what it can have been at most.
        cpu_s_per_gb: Both ends; None if the transfer was cut.
    """

    name: str
    rate: float
    is_bound: bool
    cpu_s_per_gb: float | None


class PeerDiedError(Exception):
    """A process of a peer has ended."""


class End:
    """A process of `end.py`, and the conversation with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b"= "):  # The engines print as well.
                return json.loads(line[2:])
        raise PeerDiedError

    async def ask(self, **command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.hear()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@contextlib.contextmanager
def allowed_controls() -> Iterator[None]:
    """Let namespaces choose any congestion control the kernel has; undone at the end."""
    before = ALLOWED.read_text()
    ALLOWED.write_text(ALLOWED.with_name("tcp_available_congestion_control").read_text())
    try:
        yield
    finally:
        ALLOWED.write_text(before)


async def host_default(wan: Wan, control: str) -> None:
    """Make both ends hosts whose sockets use `control` unless they say otherwise."""
    setting = f"net.ipv4.tcp_congestion_control={control}"
    for side in SIDES:
        process = await wan.run(side, ["sysctl", "-q", "-w", setting])
        assert await process.wait() == 0


@asynccontextmanager
async def ends(
    wan: Wan, python: Path, engine: Engine, num_bytes: int, side: Side
) -> AsyncIterator[tuple[End, End]]:
    """Sender and receiver, connected."""
    pipes: dict[str, Any] = {
        "stdin": asyncio.subprocess.PIPE,
        "stdout": asyncio.subprocess.PIPE,
        "stderr": None if os.environ.get("PEER_LOGS") else asyncio.subprocess.DEVNULL,
        "env": os.environ | engine.environment,
    }
    made = []
    try:
        places: list[tuple[str, Side]] = [("receive", "b"), ("send", side)]
        for role, where in places:
            command = [str(python), str(END), engine.name, role, wan.address(where), str(num_bytes)]
            made.append(End(await wan.run(where, command, **pipes)))
        there = await made[0].hear()
        await made[1].hear()
        await made[1].ask(connect=there)
        yield made[1], made[0]
    finally:
        for end in made:
            await end.kill()


async def measure(
    wan: Wan, python: Path, engine: Engine, num_bytes: int, warm_bytes: int, side: Side
) -> PeerRun:
    """Throughput of one engine, over connections that have carried `warm_bytes` twice."""
    async with ends(wan, python, engine, max(num_bytes, warm_bytes), side) as (sender, receiver):
        for _ in range(2):
            await sender.ask(transfer=warm_bytes)
        assert await receiver.ask(compare=warm_bytes), f"{engine.name} moved other bytes"
        seconds: list[float] = []
        before_s = await cpu_s(sender, receiver)
        while len(seconds) < REPEATS and sum(seconds) < ENOUGH_S:
            before = (await wan.counters()).there.delivered_bytes
            try:
                async with asyncio.timeout(TRANSFER_MAX_S):
                    seconds.append((await sender.ask(transfer=num_bytes))["s"])
            except TimeoutError:
                moved = (await wan.counters()).there.delivered_bytes - before
                return PeerRun(engine.name, moved * 8 / TRANSFER_MAX_S, True, None)
        spent = await cpu_s(sender, receiver) - before_s
    rate = num_bytes * 8 / statistics.median(seconds)
    return PeerRun(engine.name, rate, False, spent / (len(seconds) * num_bytes / 1e9))


async def cpu_s(*ends: End) -> float:
    """CPU seconds of all together so far."""
    total = 0.0
    for end in ends:
        total += (await end.ask(cpu=1))["cpu_s"]
    return total


async def best(row: Row, engines: list[Engine], venv: Path, control: str) -> PeerRun:
    """The fastest engine under a host default; without a rate both ends are on one loopback."""
    python, runs = venv / "bin" / "python", []
    warm_bytes = WARM_BYTES_LOSSY if row.loss else WARM_BYTES
    side: Side = "a" if row.rate else "b"
    for engine in engines:
        with allowed_controls():
            async with Wan(**row.shape) as wan:
                await host_default(wan, control)
                try:
                    run = await measure(wan, python, engine, row.num_bytes, warm_bytes, side)
                except PeerDiedError:
                    print(f"{engine.name} died; PEER_LOGS=1 shows why", file=sys.stderr)
                else:
                    runs.append(run)
    if not runs:
        raise SystemExit("no peer survived")
    return max(runs, key=lambda run: run.rate)
