"""Links with and without lossless coding, in the WAN lab. Needs root.

    python -m benchmarks.link.codecs [--rows 1,2,3] [--repeats 3]

Prints a table for docs/results/codecs.md: each row is one link with coding off ("raw") and on
("auto"), one after the other and twice over, with the same blocks: normal numbers in bfloat16,
64 MiB of different ones. Rates are of bytes of blocks. CPU is of both ends, digests included.
"""

import asyncio
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from .arms import NONE, compare, transfers
from .end import MIB
from .rows import G1, G5, Row

ROWS = [
    Row("0.5 Gbit/s, 40 ms", 128 * MIB, G1 // 2, 40, 0, 0, NONE),
    Row("1 Gbit/s, 40 ms", 256 * MIB, G1, 40, 0, 0, NONE),
    Row("5 Gbit/s, 20 ms", 256 * MIB, G5, 20, 0, 0, NONE),
    Row("loopback", 512 * MIB, 0, 0, 0, 0, NONE),
]


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
    found = await transfers(row, identities, 0, repeats)
    before, after, moved = found.before, found.after, found.num_bytes
    return Run(
        found.rates,
        found.first_ms,
        (found.sender_cpu_s + found.receiver_cpu_s) / (moved / 1e9),
        moved / (after["wire_bytes"] - before["wire_bytes"]),
        (after["codec_s"] - before["codec_s"]) / (moved / 1e9),
        after["is_coding"],
    )


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
    HEAD = "| link | codec | Mbit/s of blocks | to raw | first block ms | ratio | CPU-s/GB |"
    asyncio.run(compare(__doc__, ROWS, "raw,auto", HEAD, run, show))
