"""Hand-offs of prompts over links of four rates, by coding and quality class. Needs root.

    python -m benchmarks.link.classes [--rows 1,2] [--repeats 2] [--rounds 1]

Two real pool nodes' links in two network namespaces send the blocks of a prompt of a model with
the cache of the paper's case study: 64 tokens of keys and values in bfloat16 (normal numbers) to a
block, and 174 MiB of float32 state. The time is that until the sender knows that the last block is
usable. Beside it the time and the bytes of the same hand-off in the simulator, with the measured
rates of the codecs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.codec.gain import BlockCoding, PlannedCoding
from prfaas.sim.resources.transport import make_link
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import LinkSetup
from prfaas.units import NS_PER_MS, NS_PER_S
from tests.lab.wan import Wan

from .arms import NONE, compare
from .end import PAGE, PAPER_STATE_BLOCK, PAPER_STATE_BLOCKS
from .ours import WARM_UPS, link
from .rows import G1, G5, Row

ARMS = {
    "raw": (LinkCodec.RAW, Quality.LOSSLESS),
    "lossless": (LinkCodec.AUTO, Quality.LOSSLESS),
    "fp8": (LinkCodec.AUTO, Quality.FP8),
    "kivi4": (LinkCodec.AUTO, Quality.KIVI4),
    "kivi4+bf16-state": (LinkCodec.AUTO, Quality.KIVI4_STATE),
}
STATE_BYTES = PAPER_STATE_BLOCKS * PAPER_STATE_BLOCK
WARM_UP_TOKENS = 1024


def prompt_row(name: str, num_tokens: int, rate: int, rtt_ms: float) -> Row:
    """A link, and the hand-off of a prompt."""
    attention = num_tokens // PAGE.tokens * PAGE.num_bytes
    return Row(f"{name}, {num_tokens:,} tokens", attention + STATE_BYTES, rate, rtt_ms, 0, 0, NONE)


ROWS = [
    prompt_row("0.5 Gbit/s, 40 ms", 8192, G1 // 2, 40),
    prompt_row("1 Gbit/s, 40 ms", 8192, G1, 40),
    prompt_row("1 Gbit/s, 40 ms", 16384, G1, 40),
    prompt_row("5 Gbit/s, 20 ms", 8192, G5, 20),
    prompt_row("10 Gbit/s, 20 ms", 8192, 2 * G5, 20),
]


@dataclass(frozen=True)
class Run:
    """Hand-offs over one link.

    Attributes:
        seconds: Until the last block is usable, of each.
        wire_bytes: Bytes on the link of one, without headers.
        cpu_s: CPU seconds of both ends for one.
    """

    seconds: list[float]
    wire_bytes: float
    cpu_s: float


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables that the processes of both ends read."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def num_tokens_of(row: Row) -> int:
    return (row.num_bytes - STATE_BYTES) // PAGE.num_bytes * PAGE.tokens


async def run(row: Row, identities: Path, arm: str, repeats: int) -> Run:
    codec, quality = ARMS[arm]
    with environment(BENCH_CODEC=codec, BENCH_QUALITY=quality, BENCH_CONTENT="paper"):
        async with Wan(**row.shape) as wan, link(wan, identities, 0) as (sender, receiver):
            for _ in range(WARM_UPS):
                await sender.ask(prompt=WARM_UP_TOKENS)
            before, there = await sender.ask(telemetry=1), await receiver.ask()
            runs = [await sender.ask(prompt=num_tokens_of(row)) for _ in range(repeats)]
            after, here = await sender.ask(telemetry=1), await receiver.ask()
    assert {each["state"] for each in runs} == {"committed"}, runs
    cpu_s = after["cpu_s"] - before["cpu_s"] + here["cpu_s"] - there["cpu_s"]
    wire_bytes = after["wire_bytes"] - before["wire_bytes"]
    return Run([each["s"] for each in runs], wire_bytes / repeats, cpu_s / repeats)


def simulated(row: Row, arm: str) -> tuple[float, float]:
    """Seconds and bytes on the network of the same hand-off, alone on a simulated link."""
    codec, quality = ARMS[arm]
    share = 1 - STATE_BYTES / row.num_bytes
    planned = PlannedCoding(codec, quality=quality, attention_share=share)
    coding = None if planned.is_raw else BlockCoding(planned, "bfloat16", "float32")
    landed = list[int]()
    clock = Clock()
    setup = LinkSetup(row.rate, round(row.rtt_ms * NS_PER_MS), coding=coding)
    made = make_link(clock, setup, STATE_BYTES, lambda _: landed.append(clock.now_ns))
    made.add(made.open(Request(0, 0, 1, 1), row.num_bytes), row.num_bytes, last=True)
    clock.go()
    return landed[0] / NS_PER_S, made.sent_bytes


def show(row: Row, found: dict[str, list[Run]]) -> None:
    raw = statistics.median(s for each in found["raw"] for s in each.seconds)
    for arm, runs in found.items():
        seconds = [s for each in runs for s in each.seconds]
        wire_bytes = statistics.fmean(each.wire_bytes for each in runs)
        model_s, model_bytes = simulated(row, arm)
        print(
            f"| {row.name} | {arm} | {row.num_bytes / wire_bytes:.2f} | {wire_bytes / 1e6:,.0f} "
            f"| {statistics.median(seconds):.2f} | {statistics.median(seconds) / raw:.2f} "
            f"| {statistics.fmean(each.cpu_s for each in runs):.2f} "
            f"| {model_bytes / 1e6:,.0f} | {model_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    HEAD = (
        "| link, prompt | coding | ratio | MB on the link | s to the last block | to raw | CPU-s "
        "| simulated MB | simulated s |"
    )
    asyncio.run(compare(__doc__, ROWS, ",".join(ARMS), HEAD, run, show))
