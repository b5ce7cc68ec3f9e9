"""Cost of each protection of a link's blocks, in the WAN lab. Needs root.

    python -m benchmarks.link.encryption [--rows 1,2,3] [--rounds 2] [--repeats 3]

Prints a table for docs/results/link-encryption.md: each row is one link by TLS, sealed records and
network protection, one after the other and that several times over, blocks raw. CPU is of whole
processes at both ends, digests included. Calls and wake-ups are of their kernels, counted by perf:
sender + receiver, and without it left out.
"""

import asyncio
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.transfer.link_encryption import LinkEncryption
from tests.lab.wan import Wan

from . import bare
from .arms import NONE, compare, transfers
from .calls import counted
from .end import MIB
from .rows import BUDGET_SHARE, G1, G5, Row

ROWS = [
    Row("loopback", 512 * MIB, 0, 0, 0, 0, NONE),
    Row("5 Gbit/s, 20 ms", 256 * MIB, G5, 20, 0, 0, NONE),
    Row("1 Gbit/s, 40 ms", 256 * MIB, G1, 40, 0, 0, NONE),
]
ARMS = ("bare", "tls", "sealed", "network")
"""Others: `sealed-short` has fragments of 4 ms at any round trip, `sealed-4lanes` four lanes and
LANE_CONNECTIONS connections."""
LANE_CONNECTIONS = 8


@dataclass(frozen=True)
class Run:
    """Transfers over one link.

    Attributes:
        rates: Bits of blocks a second, of each transfer.
        first_ms: Until the sender hears of the first block, of each.
        sender_s: CPU seconds of the sender for a GB of blocks.
        receiver_s: The same of the receiver.
        calls: Calls that move bytes, for a GB: sender and receiver.
        wake_ups: Of their event loops, for a GB.
    """

    rates: list[float]
    first_ms: list[float]
    sender_s: float
    receiver_s: float
    calls: list[float]
    wake_ups: list[float]


async def run(row: Row, identities: Path, arm: str, repeats: int) -> Run:
    if arm == "bare":
        return await run_bare(row, identities, repeats)
    encryption, _, setting = arm.partition("-")
    os.environ["BENCH_ENCRYPTION"] = encryption
    os.environ["BENCH_FRAGMENT_ROUND_TRIPS"] = "0" if setting == "short" else ""
    lanes = int(setting.removesuffix("lanes")) if setting.endswith("lanes") else 1
    os.environ["BENCH_LANES"] = str(lanes)
    os.environ["BENCH_CONNECTIONS"] = str(LANE_CONNECTIONS if setting.endswith("lanes") else 0)
    found = await transfers(row, identities, round(row.rate * BUDGET_SHARE), repeats)
    assert found.after["encryption"] == LinkEncryption(encryption), found.after["encryption"]
    moved = found.num_bytes / 1e9
    sender_s, receiver_s = found.sender_cpu_s / moved, found.receiver_cpu_s / moved
    calls = [end.sockets / moved for end in found.calls]
    wake_ups = [end.wake_ups / moved for end in found.calls]
    return Run(found.rates, found.first_ms, sender_s, receiver_s, calls, wake_ups)


async def run_bare(row: Row, directory: Path, repeats: int) -> Run:
    """Bytes by blocking calls over bare connections: what the kernel takes in this lab."""
    async with (
        Wan(**row.shape) as wan,
        bare.ends(wan, row, round(row.rate * BUDGET_SHARE)) as (sender, receiver),
    ):
        _, *before = await bare.send_and_take(sender, receiver, 64 * MIB)
        processes = [end.process.pid for end in (sender, receiver)]
        async with counted(processes, directory) as calls:
            runs = [
                await bare.send_and_take(sender, receiver, row.num_bytes) for _ in range(repeats)
            ]
    moved = repeats * row.num_bytes / 1e9
    sender_s, receiver_s = runs[-1][1] - before[0], runs[-1][2] - before[1]
    return Run(
        [row.num_bytes * 8 / took for took, *_ in runs],
        [0.0],
        sender_s / moved,
        receiver_s / moved,
        [end.sockets / moved for end in calls.of],
        [end.wake_ups / moved for end in calls.of],
    )


def show(row: Row, found: dict[str, list[Run]]) -> None:
    def rate_of(runs: list[Run]) -> float:
        return statistics.median(rate for each in runs for rate in each.rates)

    base = rate_of(next(iter(found.values())))
    for arm, runs in found.items():
        rate = rate_of(runs)
        first = statistics.median(ms for each in runs for ms in each.first_ms)
        each_cpu = " / ".join(f"{one.sender_s + one.receiver_s:.2f}" for one in runs)
        sender = statistics.fmean(one.sender_s for one in runs)
        receiver = statistics.fmean(one.receiver_s for one in runs)
        print(
            f"| {row.name} | {arm} | {rate / 1e9:.2f} | {rate / base:.2f} | {first:.0f} "
            f"| {each_cpu} ({sender:.2f} + {receiver:.2f}) "
            f"| {thousands([one.calls for one in runs])} "
            f"| {thousands([one.wake_ups for one in runs])} |",
            flush=True,
        )


def thousands(counts: list[list[float]]) -> str:
    """Mean over runs of sender and receiver, in thousands."""
    return " + ".join(f"{statistics.fmean(end) / 1e3:.1f}" for end in zip(*counts, strict=True))


if __name__ == "__main__":
    HEAD = (
        "| link | protection | Gbit/s of blocks | to TLS | first block ms | CPU-s/GB: both ends "
        "| calls that move bytes, thousands a GB | wake-ups, thousands a GB |"
    )
    asyncio.run(compare(__doc__, ROWS, ",".join(ARMS), HEAD, run, show))
