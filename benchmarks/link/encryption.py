"""What each protection of a link's blocks costs, in the WAN lab. Needs root.

    python -m benchmarks.link.encryption [--rows 1,2,3] [--rounds 2] [--repeats 3]

Prints a table for docs/results/link-encryption.md: each row is one link by TLS, sealed records and
network protection, one after the other and that several times over, blocks raw. CPU is of whole
processes at both ends, digests included; calls are of sockets, data connections alone.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.lab.wan import Wan
from prfaas.wire.identity import make_authority, make_identity

from .end import MIB
from .ours import WARM_UPS, link
from .rows import BUDGET_SHARE, G1, G5, Row, goals

NONE = goals(0, 0)
ROWS = [
    Row("loopback", 512 * MIB, 0, 0, 0, 0, NONE),
    Row("5 Gbit/s, 20 ms", 256 * MIB, G5, 20, 0, 0, NONE),
    Row("1 Gbit/s, 40 ms", 256 * MIB, G1, 40, 0, 0, NONE),
]
ARMS = ("tls", "sealed", "network")


@dataclass(frozen=True)
class Run:
    """Transfers over one link.

    Attributes:
        rates: Bits of blocks a second, of each transfer.
        first_ms: Until the sender hears of the first block, of each.
        sender_s: CPU seconds of the sender for a GB of blocks.
        receiver_s: The same of the receiver.
    """

    rates: list[float]
    first_ms: list[float]
    sender_s: float
    receiver_s: float


async def run(row: Row, identities: Path, arm: str, repeats: int) -> Run:
    os.environ |= {"BENCH_ENCRYPTION": arm}
    budget = round(row.rate * BUDGET_SHARE)
    async with (
        Wan(**row.shape) as wan,
        link(wan, identities, budget, "a" if row.rate else "b") as (sender, receiver),
    ):
        for _ in range(WARM_UPS):
            await sender.ask(transfer=64 * MIB if row.rate else row.num_bytes)
        before, there = await sender.ask(telemetry=1), await receiver.ask()
        runs = [await sender.ask(transfer=row.num_bytes) for _ in range(repeats)]
        after, here = await sender.ask(telemetry=1), await receiver.ask()
        assert {run["state"] for run in runs} == {"committed"}, runs
        assert after["encryption"] == LinkEncryption(arm), after["encryption"]
    moved = repeats * row.num_bytes / 1e9
    return Run(
        [row.num_bytes * 8 / run["s"] for run in runs],
        [run["first_s"] * 1e3 for run in runs],
        (after["cpu_s"] - before["cpu_s"]) / moved,
        (here["cpu_s"] - there["cpu_s"]) / moved,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="numbers of rows, from 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    given = parser.parse_args()
    rows = [ROWS[int(number) - 1] for number in given.rows.split(",") if number] or ROWS
    arms = given.arms.split(",")
    with tempfile.TemporaryDirectory() as directory:
        identities = Path(directory)
        make_authority(identities)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(identities, name)
        print(
            "| link | protection | Gbit/s of blocks | to TLS | first block ms | CPU-s/GB: both ends"
        )
        print("|---|---|---|---|---|---|")
        for row in rows:
            found: dict[str, list[Run]] = {arm: [] for arm in arms}
            for _ in range(given.rounds):
                for arm in arms:
                    print(time.strftime("%H:%M:%S"), row.name, arm, file=sys.stderr, flush=True)
                    found[arm].append(await run(row, identities, arm, given.repeats))
            show(row, found)


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
            f"| {each_cpu} ({sender:.2f} + {receiver:.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
