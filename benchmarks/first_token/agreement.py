"""TTFT with first tokens from the engines that prefill: simulator beside live. Needs root.

    python -m benchmarks.first_token.agreement [--rows fast,slow,bursty] [--relay] [--csv FILE]

The same requests through simulator and processes, over links of the lab, all offloaded; the rows
in turns, each with other requests. On a busy machine engines are late: a run whose steps were later
than `LAG_MAX_S` on average is discarded, and made once more while there is time (`LIMIT_S`). Prints
a row for each link; exit code 1 if the medians of the TTFT differ by more than 5 %, a row has no
run that counts, or an answer was wrong. With `--relay`, longer answers go on until their blocks
have come; exit code 1 also if the number of those tokens differs by more than 10 %.
"""

import argparse
import asyncio
import csv
import io
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.case_study.designs import case_study
from benchmarks.case_study.live import BUDGET_SHARE, Live, Scale, run
from benchmarks.case_study.outcome import Outcome
from benchmarks.case_study.simulated import simulate
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S
from tests.lab.wan import Wan, why_not

SCALE = Scale(bytes=0.01, time=1.0, rtt_ms=40)
LENGTHS, OUTPUT_TOKENS, RELAY_TOKENS = (8_193, 16_385, 32_769), 40, 320
"""A token beyond whole blocks: engines ship no others, the simulator ships all of a prompt."""
APART_MAX, RELAYED_APART_MAX = 0.05, 0.1
LAG_MAX_S = 0.002
"""Of a machine with cores to spare; at 2.6 ms TTFT was 7 % longer."""
WARM, WARM_S = [[LENGTHS[-1]] * 4] * 3 + [[LENGTHS[0]]], 10.0
"""Prompts before those that count, so that each engine's two connections have carried a long one;
and the time that the simulator takes for the last of them, s."""
PAYLOAD = 1448 / 1514
"""Of a packet; the lab's rate includes headers."""
DRAIN_S, LIMIT_S = 25.0, 360.0


@dataclass(frozen=True)
class Link:
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


LINKS = {
    "fast": Link(5e9, 3.0),
    "slow": Link(1e9, 7.0),
    "bursty": Link(2.5e9, 5.0, period_s=8.0, low=0.4),
}


@dataclass
class Row:
    """Runs over a link."""

    link: Link
    kept: list[tuple[list[Outcome], Live]] = field(default_factory=list)
    num_late: int = 0

    def judged(self) -> tuple[dict[str, str], bool]:
        """Cells, and whether simulator and live agree."""
        lives = [live for _, live in self.kept]
        there = [t for outcomes, _ in self.kept for t in ttft(outcomes)]
        here = [t for live in lives for t in ttft(live.outcomes)]
        cells = {"runs": f"{len(lives)}", "discarded": f"{self.num_late}"}
        if not lives:
            return cells, False
        errors = sum(bool(each.error) for live in lives for each in live.outcomes)
        cells |= {"requests": f"{len(here)}", "errors": f"{errors}"}
        agrees = not errors and len(here) == len(there)
        for name, figure in (("P50", statistics.median), ("mean", statistics.fmean)):
            apart = figure(here) / figure(there) - 1
            cells |= {
                f"TTFT {name}, s: simulator": f"{figure(there):.3f}",
                f"{name}: live": f"{figure(here):.3f}",
                f"{name}: differ": f"{apart:+.1%}",
            }
            agrees &= abs(apart) <= APART_MAX or name == "mean"
        simulated = sum(each.relayed for outcomes, _ in self.kept for each in outcomes)
        relayed = sum(each.relayed for live in lives for each in live.outcomes)
        apart = relayed / simulated - 1 if simulated else float(relayed > 0)
        cells |= {
            "relayed tokens: simulator": f"{simulated}",
            "tokens: live": f"{relayed}",
            "tokens: differ": f"{apart:+.1%}",
            "steps late on average, ms": f"{max(live.lag_s for live in lives) * 1e3:.1f}",
            "cores in use": f"{max(live.busy_ratio for live in lives):.0%}",
        }
        return cells, agrees and abs(apart) <= RELAYED_APART_MAX


def requests_of(link: Link, seed: int, count: int, num_tokens: int) -> list[Request]:
    """Prompts of a few lengths, in turns: over a link that many share, routes are left as late."""
    rng = np.random.default_rng(seed)
    instants = np.cumsum(rng.uniform(0.7, 1.3, count) * link.gap_s)
    lengths = rng.permutation(np.resize(LENGTHS, count))
    return [
        Request(number, round(at * NS_PER_S), int(length), num_tokens)
        for number, (at, length) in enumerate(zip(instants, lengths, strict=True))
    ]


async def measure(link: Link, seed: int, count: int, *, relay: bool) -> tuple[list[Outcome], Live]:
    """Simulate requests, and run them."""
    question, designs = case_study()
    design = replace(designs[-1], is_early=True, relays=relay)  # It offloads everything.
    num_tokens = RELAY_TOKENS if relay else OUTPUT_TOKENS
    asked = requests_of(link, seed, count, num_tokens)
    end_s = asked[-1].arrived_at_ns / NS_PER_S + DRAIN_S
    # Pool nodes send at their budget (docs/results/link.md: 89 % of the link are blocks).
    settings = [f"link.bandwidth={link.bits_per_s * BUDGET_SHARE * PAYLOAD / 1e9:g}Gbps"]
    if link.period_s:
        repeat = int(end_s / link.period_s / 2) + 1
        failure = f'kind="link",at="{WARM_S + link.period_s}s",duration="{link.period_s}s"'
        settings.append(f"failure=[{{{failure},capacity={link.low},repeat={repeat}}}]")
    first = Request(len(asked), 0, WARM[-1][0], 2)
    for request in asked:
        request.arrived_at_ns += round(WARM_S * NS_PER_S)
    shown = simulate(
        question, design, [first, *asked], end_s + WARM_S, SCALE.rtt_ms / 1e3, settings
    )
    simulated = [
        replace(o, arrived=o.arrived - WARM_S, first=o.first and o.first - WARM_S)
        for o in shown[1:]
    ]

    async def changing(wan: Wan) -> None:
        back = round(link.bits_per_s / SCALE.time)
        while link.period_s:
            for share in (1.0, link.low):
                rate = round(link.bits_per_s * SCALE.bytes / SCALE.time * share)
                await wan.change(rate_bits_per_s=rate, rate_back_bits_per_s=back)
                await asyncio.sleep(link.period_s * SCALE.time)

    with tempfile.TemporaryDirectory(prefix="agreement-") as place:
        live = await run(
            design, requests_of(link, seed, count, num_tokens), end_s, SCALE, link.bits_per_s,
            Path(place), changing=changing, warm=WARM,
        )  # fmt: skip
    return simulated, live


def ttft(outcomes: list[Outcome]) -> list[float]:
    """Times to first token, s."""
    return [each.first - each.arrived for each in outcomes if each.first is not None]


def measured(options: argparse.Namespace) -> dict[str, Row]:
    """Runs of every row, in turns."""
    rows = {name: Row(LINKS[name]) for name in options.rows.split(",")}
    began, seed = time.monotonic(), 36
    while any(len(row.kept) < options.runs for row in rows.values()):
        for name, row in rows.items():
            if time.monotonic() - began > LIMIT_S:
                return rows
            if len(row.kept) < options.runs:
                found = asyncio.run(measure(row.link, seed, options.requests, relay=options.relay))
                lag_s = found[1].lag_s
                print(f"{name}: steps were {lag_s * 1e3:.1f} ms late", file=sys.stderr, flush=True)
                if lag_s > LAG_MAX_S:
                    row.num_late += 1
                else:
                    row.kept.append(found)
        seed += 1
    return rows


def main() -> None:
    """Measure the rows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(LINKS))
    parser.add_argument("--requests", type=int, default=6, help="of a run")
    parser.add_argument("--runs", type=int, default=2, help="of a row that count")
    parser.add_argument("--relay", action="store_true")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    options = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    judged = {name: row.judged() for name, row in measured(options).items()}
    text = io.StringIO()
    columns = ["link", *max((cells for cells, _ in judged.values()), key=len)]
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows({"link": name, **cells} for name, (cells, _) in judged.items())
    print(text.getvalue(), end="")
    if options.csv:
        options.csv.write_text(text.getvalue())
    sys.exit(not all(agrees for _, agrees in judged.values()))


if __name__ == "__main__":
    main()
