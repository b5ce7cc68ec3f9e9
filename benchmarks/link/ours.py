"""Throughput of our link and of iperf3 in the WAN lab."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.wan import Side, Wan

from .end import KV_BLOCK, MIB
from .rows import QUEUE_MS, Row

WARM_UPS = 2
CHANGES = (10**9, 10**8, 10**9)
"""Rates of the path, bits a second, one after the other while a transfer is under way."""


@dataclass(frozen=True)
class Measured:
    """Medians of one row.

    Attributes:
        rate: Bits of blocks a second, until the sender hears of the commit.
        first_ms: Until it hears of the first block.
        queue_loss: Share of segments that the bottleneck's queue dropped.
        cpu_s_per_gb: CPU seconds of both ends, digests included.
    """

    rate: float
    first_ms: float
    queue_loss: float
    cpu_s_per_gb: float


class End:
    """A process of `end.py`, and the conversation with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(150):
            line = await self.process.stdout.readline()
        if not line:
            raise SystemExit("an end of the link has died; its error is above")
        return json.loads(line)

    async def ask(self, **command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.hear()


def options() -> dict[str, Any]:
    return {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}


@asynccontextmanager
async def both_ends(
    wan: Wan, side: Side, receive: list[str], send: list[str]
) -> AsyncIterator[tuple[End, End]]:
    """Sender and receiver, connected: words of Python's command line of each."""
    receiver = End(await wan.run("b", [sys.executable, *receive], **options()))
    assert await receiver.hear() == "ready"
    sender = End(await wan.run(side, [sys.executable, *send], **options()))
    assert await sender.hear() == "ready"
    yield sender, receiver
    for end in (sender, receiver):
        assert end.process.stdin is not None
        end.process.stdin.close()
        await end.process.wait()


def link(
    wan: Wan, identities: Path, budget: int, side: Side = "a"
) -> AbstractAsyncContextManager[tuple[End, End]]:
    """Both ends of a link; sender and receiver. With side b both are on one loopback."""
    module, there = ["-m", "benchmarks.link.end"], wan.address("b")
    receive = [*module, "receive", str(identities), there]
    return both_ends(wan, side, receive, [*module, "send", str(identities), there, str(budget)])


async def iperf(wan: Wan, control: str, streams: int) -> float:
    """Bits per second that iperf3 receives in four seconds, the first second left out."""
    if shutil.which("iperf3") is None:
        return 0.0
    server = await wan.run(
        "b", ["iperf3", "-s", "-1", "--forceflush"], stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    while b"listening" not in await server.stdout.readline():
        pass
    args = ["iperf3", "-c", wan.address("b"), "-C", control, "-P", str(streams), "-J"]
    client = await wan.run("a", [*args, "-t", "4", "-O", "1"], stdout=asyncio.subprocess.PIPE)
    output, _ = await client.communicate()
    await server.wait()
    rate: float = json.loads(output)["end"]["sum_received"]["bits_per_second"]
    return rate


async def measure(row: Row, identities: Path, budget: int, repeats: int) -> Measured:
    """Transfers over a link whose connections are warm."""
    side: Side = "a" if row.rate else "b"
    async with (
        Wan(**row.shape) as wan,
        link(wan, identities, budget, side) as (sender, receiver),
    ):
        for _ in range(WARM_UPS):
            await sender.ask(transfer=64 * MIB if row.rate else row.num_bytes)
        before = await wan.counters()
        cpu = (await sender.ask(telemetry=1))["cpu_s"] + (await receiver.ask())["cpu_s"]
        runs = [await sender.ask(transfer=row.num_bytes) for _ in range(repeats)]
        cpu = (await sender.ask(telemetry=1))["cpu_s"] + (await receiver.ask())["cpu_s"] - cpu
        after = await wan.counters()
        assert {run["state"] for run in runs} == {"committed"}
        sent = after.there.sent - before.there.sent
        return Measured(
            rate=row.num_bytes * 8 / statistics.median(run["s"] for run in runs),
            first_ms=statistics.median(run["first_s"] for run in runs) * 1e3,
            queue_loss=(after.there.overflowed - before.there.overflowed) / max(1, sent),
            cpu_s_per_gb=cpu / (repeats * row.num_bytes / 1e9),
        )


def lab(rtt_ms: float = 40) -> Wan:
    return Wan(rtt_ms=rtt_ms, rate_bits_per_s=10**9, queue_ms=QUEUE_MS)


async def first_block(
    identities: Path, budget: int, rtt_ms: float = 40
) -> tuple[float, float, float]:
    """Arrival of a first block, as its sender hears of it, in ms: idle link, and busy link; and the
    round trip of a message on the busy link."""
    async with lab(rtt_ms) as wan, link(wan, identities, budget) as (sender, _):
        for _ in range(WARM_UPS):
            await sender.ask(transfer=64 * MIB)
        idle = [(await sender.ask(transfer=KV_BLOCK))["first_s"] for _ in range(5)]
        await sender.ask(bulk=256 * MIB)
        busy = [(await sender.ask(transfer=KV_BLOCK))["first_s"] for _ in range(12)]
        rtt_ns = (await sender.ask(telemetry=1))["rtt_ns"]
        await sender.ask(bulk_done=1)
    return statistics.median(idle) * 1e3, statistics.median(busy[2:]) * 1e3, rtt_ns / 1e6


async def overlap(identities: Path, budget: int) -> float:
    """From the last chunk to the last block's acknowledgement, ms: 4 MiB every 50 ms."""
    async with lab() as wan, link(wan, identities, budget) as (sender, _):
        for _ in range(WARM_UPS):
            await sender.ask(transfer=64 * MIB)
        runs = [await sender.ask(overlap=[20, 2 * KV_BLOCK, 0.05]) for _ in range(3)]
    return statistics.median(float(run["s"]) for run in runs) * 1e3


async def rate_change(identities: Path) -> tuple[str, list[float]]:
    """Goodput in Mbit/s as telemetry shows it one second after each of CHANGES."""
    async with lab() as wan, link(wan, identities, 0) as (sender, _):
        await sender.ask(transfer=64 * MIB)
        await sender.ask(bulk=512 * MIB)
        await asyncio.sleep(1)
        seen = []
        for rate in CHANGES:
            await wan.change(rate_bits_per_s=rate)
            await asyncio.sleep(1)
            seen.append((await sender.ask(telemetry=1))["goodput_bits_per_s"] / 1e6)
        (done,) = await sender.ask(bulk_done=1)
    return done["state"], seen
