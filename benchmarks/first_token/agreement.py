"""TTFT with first tokens from the engines that prefill: simulator beside live. Needs root.

    python -m benchmarks.first_token.agreement [--rows fast,slow,bursty] [--requests 24] [--relay]

The same requests through simulator and processes, over links of the lab, all offloaded. Prints a
row for each link; exit code 1 if a mean or median differs by more than 5 %, or an answer was wrong.
With `--relay`, longer answers go on until their blocks have come; exit code 1 also if the number of
those tokens differs by more than 10 %.
"""

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.case_study.designs import case_study
from benchmarks.case_study.live import Live, Scale, run
from benchmarks.case_study.outcome import Outcome
from benchmarks.case_study.simulated import simulate
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S
from tests.lab.wan import Wan, why_not

SCALE = Scale(bytes=0.01, time=1.0, rtt_ms=40)
LENGTHS, OUTPUT_TOKENS, RELAY_TOKENS = (8_192, 16_384, 32_768), 40, 320
APART_MAX, RELAYED_APART_MAX = 0.05, 0.1
DRAIN_S = 25.0


@dataclass(frozen=True)
class Row:
    """A link and its load.

    Attributes:
        bits_per_s: Of the paper's deployment, bit/s.
        gap_s: Mean time between two requests, s.
        period_s: The link changes so often, s; 0 for never.
        low: Share of it that is left in every second period.
    """

    bits_per_s: float
    gap_s: float
    period_s: float = 0.0
    low: float = 1.0


ROWS = {
    "fast": Row(10e9, 2.0),
    "slow": Row(1e9, 6.0),
    "bursty": Row(2.5e9, 4.0, period_s=8.0, low=0.2),
}


def requests_of(row: Row, count: int, num_tokens: int) -> list[Request]:
    """Poisson arrivals of prompts of a few lengths."""
    rng = np.random.default_rng(36)
    instants = np.cumsum(rng.exponential(row.gap_s, count))
    lengths = rng.permutation(np.resize(LENGTHS, count))
    return [
        Request(number, round(at * NS_PER_S), int(length), num_tokens)
        for number, (at, length) in enumerate(zip(instants, lengths, strict=True))
    ]


async def measure(row: Row, count: int, *, relay: bool) -> tuple[list[Outcome], Live]:
    """Simulate a row, and run it."""
    question, designs = case_study()
    design = replace(designs[-1], is_early=True, relays=relay)  # It offloads everything.
    num_tokens = RELAY_TOKENS if relay else OUTPUT_TOKENS
    asked = requests_of(row, count, num_tokens)
    end_s = asked[-1].arrived_at_ns / NS_PER_S + DRAIN_S
    settings = [f"link.bandwidth={row.bits_per_s / 1e9:g}Gbps"]
    if row.period_s:
        repeat = int(end_s / row.period_s / 2) + 1
        failure = f'kind="link",at={row.period_s},duration={row.period_s}'
        settings.append(f"failure=[{{{failure},capacity={row.low},repeat={repeat}}}]")
    simulated = simulate(question, design, asked, end_s, SCALE.rtt_ms / 1e3, settings)

    async def changing(wan: Wan) -> None:
        while row.period_s:
            for share in (1.0, row.low):
                rate = row.bits_per_s * SCALE.bytes / SCALE.time * share
                await wan.change(rate_bits_per_s=round(rate))
                await asyncio.sleep(row.period_s * SCALE.time)

    with tempfile.TemporaryDirectory(prefix="agreement-") as place:
        live = await run(
            design, requests_of(row, count, num_tokens), end_s, SCALE, row.bits_per_s, Path(place),
            changing=changing,
        )  # fmt: skip
    return simulated, live


def ttft(outcomes: list[Outcome]) -> list[float]:
    """Times to first token, s."""
    return [each.first - each.arrived for each in outcomes if each.first is not None]


def main() -> None:
    """Measure the rows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--relay", action="store_true")
    options = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("| link | requests | TTFT P50 s: simulator | live | differ | mean s: simulator | live | ",
          "differ | relayed tokens: simulator | live | differ | errors | behind at most, ms | ",
          "cores in use |", sep="")  # fmt: skip
    print("|---" * 14 + "|", flush=True)
    is_apart = False
    for name in options.rows.split(","):
        measured = measure(ROWS[name], options.requests, relay=options.relay)
        simulated, live = asyncio.run(measured)
        cells, errors = [], sum(bool(each.error) for each in live.outcomes)
        for figure in (statistics.median, statistics.fmean):
            there, here = figure(ttft(simulated)), figure(ttft(live.outcomes))
            is_apart |= abs(here / there - 1) > APART_MAX
            cells += [f"{there:.3f}", f"{here:.3f}", f"{here / there - 1:+.1%}"]
        there = sum(each.relayed for each in simulated)
        apart = live.relayed / there - 1 if there else float(live.relayed > 0)
        is_apart |= abs(apart) > RELAYED_APART_MAX
        cells += [f"{there:.0f}", f"{live.relayed:.0f}", f"{apart:+.1%}"]
        is_apart |= errors > 0 or len(ttft(simulated)) != len(ttft(live.outcomes))
        cells += [f"{errors}", f"{live.behind_s * 1e3:.0f}", f"{live.busy_ratio:.0%}"]
        print(f"| {name} | {len(live.outcomes)} | {' | '.join(cells)} |", flush=True)
    sys.exit(is_apart)


if __name__ == "__main__":
    main()
