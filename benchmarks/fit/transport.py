"""Goodput of the link over long and lossy paths, beside the model. Needs root.

    chrt -r 1 python -m benchmarks.fit.transport [--rows 1,2,3]

Real pool-node links in the WAN lab at 1 Gbit/s, as in `benchmarks.link`; CUBIC is forced on the
sending end for its rows. Five minutes. Keep the machine idle meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path as File

from benchmarks.link.ours import link
from benchmarks.link.rows import BUDGET_SHARE, QUEUE_MS
from prfaas.core.transfer.tcp_goodput import (
    CongestionControl,
    TcpEnds,
    TcpPath,
    goodput_bits_per_s,
)
from prfaas.wire.identity import make_authority, make_identity
from tests.lab.wan import Wan

MIB = 1 << 20
RATE = 10**9
USABLE = 0.93
"""Share of the rate that blocks have over a short path without loss: docs/results/link.md."""
REPEATS = 3


@dataclass(frozen=True)
class Row:
    """A path, and transfers over it: size, MiB."""

    control: CongestionControl
    rtt_ms: float
    loss: float
    size_mib: int


BBR, CUBIC = CongestionControl
ROWS = [
    *(Row(BBR, rtt, loss, 256) for rtt in (10, 80, 160, 300) for loss in (0, 0.001, 0.01)),
    Row(BBR, 40, 0.03, 256),
    *(Row(BBR, 100, loss, 512) for loss in (0, 0.001, 0.01)),
    Row(CUBIC, 40, 0, 256),
    Row(CUBIC, 10, 0.001, 64),
    Row(CUBIC, 40, 0.001, 32),
    Row(CUBIC, 160, 0.001, 16),
    Row(CUBIC, 10, 0.01, 16),
    Row(CUBIC, 40, 0.01, 8),
]


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="numbers of rows, from 1: these, and no more")
    wanted = [int(number) - 1 for number in parser.parse_args().rows.split(",") if number]
    titles = ("control", "round trip", "loss", "transfer", "measured", "model", "measured / model")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        identities = File(directory)
        make_authority(identities)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(identities, name)
        for row in [ROWS[index] for index in wanted] or ROWS:
            print(f"{time.strftime('%H:%M:%S')} {row}", file=sys.stderr, flush=True)
            _print(row, await measure(row, identities))


async def measure(row: Row, identities: File) -> float:
    """Median time of a transfer over warm connections, s."""
    os.environ["BENCH_CONGESTION_CONTROL"] = row.control
    shape = Wan(rtt_ms=row.rtt_ms, rate_bits_per_s=RATE, loss=row.loss, queue_ms=QUEUE_MS)
    num_bytes = row.size_mib * MIB
    budget = round(RATE * BUDGET_SHARE)
    async with shape as wan, link(wan, identities, budget) as (sender, _):
        await sender.ask(transfer=min(num_bytes, 64 * MIB))
        await sender.ask(transfer=min(num_bytes, 64 * MIB))
        runs = [await sender.ask(transfer=num_bytes) for _ in range(REPEATS)]
    assert {run["state"] for run in runs} == {"committed"}
    return statistics.median(float(run["s"]) for run in runs)


def _print(row: Row, seconds: float) -> None:
    bits = row.size_mib * MIB * 8
    path = TcpPath(RATE * USABLE, row.rtt_ms / 1e3, row.loss)
    predicted_s = bits / goodput_bits_per_s(path, TcpEnds(control=row.control)) + path.rtt_s
    cells = (
        row.control.value,
        f"{row.rtt_ms:g} ms",
        f"{row.loss * 100:g} %",
        f"{row.size_mib} MiB",
        f"{bits / seconds / 1e6:.1f} Mbit/s",
        f"{bits / predicted_s / 1e6:.1f} Mbit/s",
        f"{predicted_s / seconds:.2f}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
