"""Links with and without lossless coding, in the WAN lab. Needs root.

    python -m benchmarks.link.codecs [--rows 1,2,3] [--repeats 3]

Prints a table for docs/results/codecs.md: each row is one link with coding off ("raw") and on
("auto"), one after the other and twice over, with the same blocks: normal numbers in bfloat16,
64 MiB of different ones. Rates are of bytes of blocks. CPU is of both ends, digests included.
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

from prfaas.lab.wan import Wan
from prfaas.wire.identity import make_authority, make_identity

from .end import MIB
from .ours import WARM_UPS, link
from .rows import G1, G5, Row, goals

NONE = goals(0, 0)
ROWS = [
    Row("0.5 Gbit/s, 40 ms", 128 * MIB, G1 // 2, 40, 0, 0, NONE),
    Row("1 Gbit/s, 40 ms", 256 * MIB, G1, 40, 0, 0, NONE),
    Row("5 Gbit/s, 20 ms", 256 * MIB, G5, 20, 0, 0, NONE),
    Row("loopback", 512 * MIB, 0, 0, 0, 0, NONE),
]
ARMS = ("raw", "auto", "always")


@dataclass(frozen=True)
class Run:
    """Transfers over one link.

    Attributes:
        rates: Bits of blocks a second, of each transfer.
        first_ms: Until the sender hears of the first block, of each.
        cpu_s_per_gb: CPU seconds of both ends for a GB of blocks.
        ratio: Bytes of blocks for a byte on the link.
        codec_s_per_gb: CPU seconds of the sending codec for a GB of blocks.
        is_coding: Whether the link codes at the end.
    """

    rates: list[float]
    first_ms: list[float]
    cpu_s_per_gb: float
    ratio: float
    codec_s_per_gb: float
    is_coding: bool


async def run(row: Row, identities: Path, arm: str, repeats: int) -> Run:
    os.environ |= {"BENCH_CODEC": arm, "BENCH_CONTENT": "bfloat16"}
    async with (
        Wan(**row.shape) as wan,
        link(wan, identities, 0, "a" if row.rate else "b") as (sender, receiver),
    ):
        for _ in range(WARM_UPS):
            await sender.ask(transfer=64 * MIB if row.rate else row.num_bytes)
        before, there = await sender.ask(telemetry=1), await receiver.ask()
        runs = [await sender.ask(transfer=row.num_bytes) for _ in range(repeats)]
        after, here = await sender.ask(telemetry=1), await receiver.ask()
        assert {run["state"] for run in runs} == {"committed"}, runs
    moved = repeats * row.num_bytes
    cpu_s = after["cpu_s"] - before["cpu_s"] + here["cpu_s"] - there["cpu_s"]
    return Run(
        [row.num_bytes * 8 / run["s"] for run in runs],
        [run["first_s"] * 1e3 for run in runs],
        cpu_s / (moved / 1e9),
        moved / (after["wire_bytes"] - before["wire_bytes"]),
        (after["codec_s"] - before["codec_s"]) / (moved / 1e9),
        after["is_coding"],
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="numbers of rows, from 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default="raw,auto")
    given = parser.parse_args()
    rows = [ROWS[int(number) - 1] for number in given.rows.split(",") if number] or ROWS
    arms = given.arms.split(",")
    with tempfile.TemporaryDirectory() as directory:
        identities = Path(directory)
        make_authority(identities)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(identities, name)
        print("| link | codec | Mbit/s of blocks | to raw | first block ms | ratio | CPU-s/GB |")
        print("|---|---|---|---|---|---|---|")
        for row in rows:
            found: dict[str, list[Run]] = {arm: [] for arm in arms}
            for _ in range(given.rounds):
                for arm in arms:
                    print(time.strftime("%H:%M:%S"), row.name, arm, file=sys.stderr, flush=True)
                    found[arm].append(await run(row, identities, arm, given.repeats))
            show(row, found)


def show(row: Row, found: dict[str, list[Run]]) -> None:
    raw = statistics.median(rate for each in found["raw"] for rate in each.rates)
    for arm, runs in found.items():
        rate = statistics.median(rate for each in runs for rate in each.rates)
        first = statistics.median(ms for each in runs for ms in each.first_ms)
        cpu = " / ".join(f"{each.cpu_s_per_gb:.2f}" for each in runs)
        codec = statistics.fmean(each.codec_s_per_gb for each in runs)
        coding = " ".join("on" if each.is_coding else "off" for each in runs)
        print(
            f"| {row.name} | {arm} ({coding}) | {rate / 1e6:,.0f} | {rate / raw:.3f} | {first:.0f} "
            f"| {statistics.fmean(each.ratio for each in runs):.3f} "
            f"| {cpu}, codec of the sender {codec:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
