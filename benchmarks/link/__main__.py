"""What the link carries, beside what iperf3 carries, in the WAN lab. Needs root.

    python -m benchmarks.link [--quick] [--peers VENV] [--rows 1,2]

Prints a table in Markdown. Shares are of the link's rate; payload alone can have 94 %.
"""

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.lab.wan import Side, Wan
from prfaas.wire.identity import make_authority, make_identity

from .end import KV_BLOCK, MIB
from .peers import cells

HELP_PEERS = """environment with nixl and Mooncake: `python -m venv VENV`, then `VENV/bin/pip
install --no-deps -r benchmarks/link/peers/requirements.txt`; Mooncake needs libibverbs1, libnuma1
and librdmacm1"""
QUEUE_MS = 20
BUDGET_SHARE = 0.93
"""Of the link's rate, as an operator would set it: payload and headers, and no standing queue."""


@dataclass
class Row:
    name: str
    num_bytes: int
    rate: int
    rtt_ms: float
    loss: float
    goal: float
    peer_goals: tuple[float, float] = (0, 0)
    """How much faster than the best peer: host default cubic, host default BBR; 0 is no goal."""


ROWS = [
    Row("256 MiB, 1 Gbit/s, 40 ms, no loss", 256 * MIB, 10**9, 40, 0, 0.88, (1.4, 1.2)),
    Row("256 MiB, 1 Gbit/s, 40 ms, 0.1 % loss", 256 * MIB, 10**9, 40, 0.001, 0.85, (8, 1.2)),
    Row("256 MiB, 1 Gbit/s, 40 ms, 1 % loss", 256 * MIB, 10**9, 40, 0.01, 0.80, (15, 1.4)),
    Row("64 MiB, 1 Gbit/s, 40 ms, no loss", 64 * MIB, 10**9, 40, 0, 0.80, (1.4, 1.2)),
    Row("256 MiB, 5 Gbit/s, 20 ms, no loss", 256 * MIB, 5 * 10**9, 20, 0, 0.75, (1.5, 1.5)),
    Row("512 MiB, loopback, unshaped, TLS", 512 * MIB, 0, 0, 0, 8),
]


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
async def link(
    wan: Wan, identities: Path, budget: int, side: Side = "a"
) -> AsyncIterator[tuple[End, End]]:
    """Both ends, connected; sender and receiver. With side b both are on one loopback."""
    python = [sys.executable, "-m", "benchmarks.link.end"]
    there = wan.address("b")
    receiver = End(await wan.run("b", [*python, "receive", str(identities), there], **options()))
    assert await receiver.hear() == "ready"
    command = [*python, "send", str(identities), there, str(budget)]
    sender = End(await wan.run(side, command, **options()))
    assert await sender.hear() == "ready"
    yield sender, receiver
    for end in (sender, receiver):
        assert end.process.stdin is not None
        end.process.stdin.close()
        await end.process.wait()


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


def shape_of(row: Row) -> dict[str, Any]:
    return {
        "rtt_ms": row.rtt_ms,
        "rate_bits_per_s": row.rate,
        "loss": row.loss,
        "queue_ms": QUEUE_MS,
    }


async def measure(row: Row, identities: Path, budget: int, repeats: int) -> dict[str, Any]:
    side: Side = "a" if row.rate else "b"
    async with (
        Wan(**shape_of(row)) as wan,
        link(wan, identities, budget, side) as (sender, receiver),
    ):
        for _ in range(2):
            await sender.ask(transfer=64 * MIB)
        before = await wan.counters()
        cpu = (await sender.ask(telemetry=1))["cpu_s"] + (await receiver.ask())["cpu_s"]
        runs = [await sender.ask(transfer=row.num_bytes) for _ in range(repeats)]
        cpu = (await sender.ask(telemetry=1))["cpu_s"] + (await receiver.ask())["cpu_s"] - cpu
        after = await wan.counters()
        assert {run["state"] for run in runs} == {"committed"}
        sent = after.there.sent - before.there.sent
        seconds = statistics.median(run["s"] for run in runs)
        return {
            "share": row.num_bytes * 8 / seconds / row.rate if row.rate else 0,
            "rate": row.num_bytes * 8 / seconds,
            "first_ms": statistics.median(run["first_s"] for run in runs) * 1e3,
            "queue_loss": (after.there.overflowed - before.there.overflowed) / max(1, sent),
            "cpu_s_per_gb": cpu / (repeats * row.num_bytes / 1e9),
        }


def lab() -> Wan:
    return Wan(rtt_ms=40, rate_bits_per_s=10**9, queue_ms=20)


async def first_block(identities: Path, budget: int) -> tuple[float, float]:
    """Arrival of a first block, as its sender hears of it, in ms: idle link, and busy link."""
    async with lab() as wan, link(wan, identities, budget) as (sender, _):
        for _ in range(2):
            await sender.ask(transfer=64 * MIB)
        idle = [(await sender.ask(transfer=KV_BLOCK))["first_s"] for _ in range(5)]
        await sender.ask(bulk=256 * MIB)
        busy = [(await sender.ask(transfer=KV_BLOCK))["first_s"] for _ in range(12)]
        await sender.ask(bulk_done=1)
    return statistics.median(idle) * 1e3, statistics.median(busy[2:]) * 1e3


async def overlap(identities: Path, budget: int) -> float:
    """From the last chunk to the last block's acknowledgement, ms: 4 MiB every 50 ms."""
    async with lab() as wan, link(wan, identities, budget) as (sender, _):
        for _ in range(2):
            await sender.ask(transfer=64 * MIB)
        runs = [await sender.ask(overlap=[20, 2 * KV_BLOCK, 0.05]) for _ in range(3)]
    return statistics.median(run["s"] for run in runs) * 1e3


async def rate_change(identities: Path) -> tuple[str, list[float]]:
    """Goodput in Mbit/s one second after 1 Gbit/s became 100 Mbit/s, and after the way back."""
    async with lab() as wan, link(wan, identities, 0) as (sender, _):
        await sender.ask(transfer=64 * MIB)
        await sender.ask(bulk=512 * MIB)
        seen = []
        for rate in (10**9, 10**8, 10**9):
            await wan.change(rate_bits_per_s=rate)
            await asyncio.sleep(1.25 if seen else 2)
            seen.append((await sender.ask(telemetry=1))["goodput_bits_per_s"] / 1e6)
        (done,) = await sender.ask(bulk_done=1)
    return done["state"], seen


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run a row, and no iperf3")
    parser.add_argument("--peers", type=Path, metavar="VENV", help=HELP_PEERS)
    parser.add_argument("--rows", default="", help="numbers of rows, from 1: these, and no more")
    arguments = parser.parse_args()
    wanted = [int(number) - 1 for number in arguments.rows.split(",") if number]
    with tempfile.TemporaryDirectory() as directory:
        identities = Path(directory)
        make_authority(identities)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(identities, name)
        rows = [ROWS[index] for index in wanted] if wanted else ROWS
        await table(rows, identities, arguments.quick, arguments.peers)
        if not wanted:
            await rest(identities)


async def table(rows: list[Row], identities: Path, quick: bool, venv: Path | None) -> None:
    repeats = 1 if quick else 3
    print(
        f"{platform.machine()}, kernel {platform.release()}, Python {platform.python_version()}\n"
    )
    print(
        "| link (queue 20 ms) | goal | ours, budget 93 % | ours, no budget | first block ms "
        "| own queue loss: budget / none | CPU-s/GB | iperf3 bbr 4 / cubic 1 "
        "| best peer, host default cubic: ours is | best peer, host default BBR: ours is |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for row in rows:
        if not row.rate:
            await loopback(row, identities, repeats, venv)
            continue
        paced = await measure(row, identities, round(row.rate * BUDGET_SHARE), repeats)
        free = await measure(row, identities, 0, repeats)
        limit = ""
        if not quick:
            async with Wan(**shape_of(row)) as wan:
                best = [await iperf(wan, *kind) for kind in (("bbr", 4), ("cubic", 1))]
            limit = " / ".join(f"{rate / row.rate:.1%}" for rate in best)
        ours = paced["share"] * row.rate
        peers = " | ".join(await cells(shape_of(row), row.num_bytes, ours, row.peer_goals, venv))
        print(
            f"| {row.name} | {row.goal:.0%} | {paced['share']:.1%} | {free['share']:.1%} "
            f"| {paced['first_ms']:.0f} | {paced['queue_loss']:.2%} / {free['queue_loss']:.2%} "
            f"| {paced['cpu_s_per_gb']:.2f} | {limit} | {peers} |",
            flush=True,
        )


async def loopback(row: Row, identities: Path, repeats: int, venv: Path | None) -> None:
    """One line: both ends on the loopback of two cores; the peers have no TLS."""
    ours = await measure(row, identities, 0, repeats)
    peers = await cells(shape_of(row), row.num_bytes, ours["rate"], row.peer_goals, venv)
    print(
        f"| {row.name} | {row.goal:g} Gbit/s | - | {ours['rate'] / 1e9:.1f} Gbit/s "
        f"| {ours['first_ms']:.0f} | - | {ours['cpu_s_per_gb']:.2f} | - | {' | '.join(peers)} |",
        flush=True,
    )


async def rest(identities: Path) -> None:
    """What is no transfer's rate."""
    budget = round(1e9 * BUDGET_SHARE)
    idle, busy = await first_block(identities, budget)
    print(f"First 2 MiB block, 1 Gbit/s, 40 ms: {idle:.0f} ms idle, {busy:.0f} ms beside bulk")
    print(f"Last chunk (4 MiB) to the last block: {await overlap(identities, budget):.0f} ms")
    state, seen = await rate_change(identities)
    print(
        "Goodput at 1 Gbit/s, 1.25 s after the change to 100 Mbit/s, and back: "
        f"{' / '.join(f'{rate:.0f}' for rate in seen)} Mbit/s; the transfer {state}"
    )


if __name__ == "__main__":
    asyncio.run(main())
