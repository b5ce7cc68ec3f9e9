"""What other transfer engines carry over the same emulated link.

They speak no TLS, and take their congestion control from the host, so each is measured under two
host defaults: cubic, which stock hosts have, and BBR.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.lab.wan import SIDES, Side, Wan

END = Path(__file__).with_name("end.py")
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
MIB = 1 << 20
TRANSFER_MAX_S = 60.0
"""A transfer that takes longer is cut, and what it moved until then is an upper bound."""


@dataclass(frozen=True)
class Engine:
    """A peer, and the settings under which it is fastest on these links."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)


ENGINES = [
    Engine("mooncake", {"MC_TCP_LANES_PER_PEER": "8"}),
    Engine(
        "nixl",
        {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "16m", "UCX_TCP_RCVBUF": "16m"},
    ),
]


@dataclass(frozen=True)
class PeerRun:
    """Medians of one engine on one link.

    Attributes:
        rate: Bits of blocks a second.
        is_bound: The transfer was cut, and `rate` is what it can have been at most.
        cpu_s_per_gb: Both ends; None if the transfer was cut.
    """

    rate: float
    is_bound: bool
    cpu_s_per_gb: float | None


class End:
    """A process of `end.py`, and the conversation with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b"= "):  # The engines print as well.
                return json.loads(line[2:])
        raise SystemExit("an end of a peer has died; its error is above")

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
        for role, where in (("receive", "b"), ("send", side)):
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
    wan: Wan,
    python: Path,
    engine: Engine,
    num_bytes: int,
    warm_bytes: int,
    repeats: int = 3,
    side: Side = "a",
) -> PeerRun:
    """What one engine carries, over connections that have carried `warm_bytes` twice."""
    async with ends(wan, python, engine, max(num_bytes, warm_bytes), side) as (sender, receiver):

        async def cpu() -> float:
            return sum([(await end.ask(cpu=1))["cpu_s"] for end in (sender, receiver)])

        for _ in range(2):
            await sender.ask(transfer=warm_bytes)
        cpu_before = await cpu()
        seconds = []
        for _ in range(repeats):
            before = (await wan.counters()).there.delivered_bytes
            try:
                async with asyncio.timeout(TRANSFER_MAX_S):
                    seconds.append((await sender.ask(transfer=num_bytes))["s"])
            except TimeoutError:
                moved = (await wan.counters()).there.delivered_bytes - before
                return PeerRun(moved * 8 / TRANSFER_MAX_S, True, None)
        spent = await cpu() - cpu_before
        return PeerRun(
            num_bytes * 8 / statistics.median(seconds),
            False,
            spent / (repeats * num_bytes / 1e9),
        )
