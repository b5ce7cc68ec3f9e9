"""Rows of the policy tables, live with timing engines, beside the simulator. Needs root.

    python -m benchmarks.goodput [--rows bursty,scarce-link,stale-plan] [--policies adaptive]

Each run takes about four minutes. Prints a table in Markdown; Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.case_study.designs import Design
from benchmarks.case_study.live import BUDGET_SHARE, Live, Scale, run
from benchmarks.case_study.outcome import Outcome
from benchmarks.scaled_plan import scaled_plan
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.units import NS_PER_S
from tests.lab.wan import why_not

from .rows import ROWS, RTT_MS, Row, Span, scenario_of, simulated

SCALE = Scale(bytes=0.0125, time=1.0, rtt_ms=RTT_MS)
DRAIN_S = 45.0
"""From the last arrival to the end: the target, and the longest answer behind it."""


@dataclass(frozen=True)
class Case:
    """A row under a policy, simulated and live."""

    name: str
    policy: str
    model: list[Outcome]
    live: Live


async def measure(row: Row, span: Span, policy: str, seed: int, name: str) -> Case:
    """Run one row in the simulator and live, with the same requests."""
    scenario = scenario_of(row, span, policy, seed)
    setup = scenario.setup
    (remote,) = setup.prfaas
    design = Design(
        name, name, setup.routing.policy, setup.routing.offload_threshold,
        remote.num_instances, setup.num_prefill, setup.num_decode, 0.0, 0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="goodput-") as place:
        planned = remote.link.bits_per_s if row.plan_settings else None
        plan = scaled_plan(planned, SCALE.bytes, Path(place))
        routing = [f'plan = "{plan}"', f'ttft_max = "{(setup.slo.ttft_ns or 0) / 1e6:g}ms"']
        # The link of the scenario is what the operator lets transfers use of a wider one.
        rate = remote.link.bits_per_s / BUDGET_SHARE
        live = await run(design, scenario.requests(), span.over, SCALE, rate, Path(place), routing)
    return Case(name, policy, simulated(scenario), live)


def table(cases: list[Case], span: Span, scenario: Scenario) -> str:
    """Goodput, shares and TTFT of every case, simulated and live."""
    lines = [
        "| row | policy | requests | goodput: simulator | live | differ | refused: simulator "
        "| live | offloaded: simulator | live | mean TTFT, s: simulator | live "
        "| P99: simulator | live "
        "| errors | behind at most, ms | cores in use |",
        "|---|---|" + "---:|" * 15,
    ]
    for case in cases:
        both = case.model, case.live.outcomes
        good, live = (goodput_of(outcomes, span, scenario) for outcomes in both)
        (refused, remote, mean, p99), (turned, sent, mean_live, p99_live) = (
            _figures(outcomes, span) for outcomes in both
        )
        count = sum(span.warm <= o.arrived < span.end for o in case.live.outcomes)
        wrong = sum(bool(o.error) and not _is_refused(o) for o in case.live.outcomes)
        cells = [
            case.name, case.policy, f"{count}",
            f"{good:.3f}", f"{live:.3f}", f"{live / good - 1:+.1%}",
            f"{refused}", f"{turned}", f"{remote:.1%}", f"{sent:.1%}",
            f"{mean:.2f}", f"{mean_live:.2f}", f"{p99:.1f}", f"{p99_live:.1f}",
            f"{wrong}", f"{case.live.behind_s * 1e3:.0f}", f"{case.live.busy_ratio:.0%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    errors = {o.error for case in cases for o in case.live.outcomes if o.error}
    return "\n".join(lines + [f"\nerror: {e}" for e in sorted(errors) if "429" not in e])


def goodput_of(outcomes: list[Outcome], span: Span, scenario: Scenario) -> float:
    """Requests that met both targets of a scenario, of those that count, req/s."""
    slo, good = scenario.setup.slo, 0
    steps = max(scenario.requests()[0].num_output_tokens - 1, 1)
    for o in outcomes:
        if o.first is None or o.done is None or o.error or not _counts(o, span):
            continue
        in_time = o.first - o.arrived <= (slo.ttft_ns or 0) / NS_PER_S
        good += in_time and (o.done - o.first) / steps <= (slo.tpot_ns or 0) / NS_PER_S
    return good / (span.end - span.warm)


def _figures(outcomes: list[Outcome], span: Span) -> tuple[int, float, float, float]:
    """Requests refused, share offloaded of those that began, mean and P99 of their TTFT, s."""
    counted = [o for o in outcomes if _counts(o, span)]
    began = [o for o in counted if o.first is not None]
    waits = sorted(o.first - o.arrived for o in began if o.first is not None)
    remote = sum(o.offloaded for o in began) / max(len(began), 1)
    mean = sum(waits) / max(len(waits), 1)
    return len(counted) - len(began), remote, mean, waits[int(0.99 * len(waits))] if waits else 0.0


def _counts(outcome: Outcome, span: Span) -> bool:
    return span.warm <= outcome.arrived < span.end


def _is_refused(outcome: Outcome) -> bool:
    return outcome.error.startswith("status 429")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--policies", default="adaptive")
    parser.add_argument("--seconds", type=float, default=150.0, help="of arrivals")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds that do not count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="what came out, request by request")
    options = parser.parse_args()
    span = Span(options.warm, options.seconds, options.seconds + DRAIN_S)
    pairs = [(n, p) for n in options.rows.split(",") for p in options.policies.split(",")]
    scenario = scenario_of(ROWS[pairs[0][0]], span, pairs[0][1], options.seed)
    if why_not():
        raise SystemExit(why_not())
    # Whoever stops us gets namespaces and processes cleaned up as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cases = [
        asyncio.run(measure(ROWS[name], span, policy, options.seed, name)) for name, policy in pairs
    ]
    if options.json:
        options.json.write_text(json.dumps([asdict(case) for case in cases], default=str))
    print(table(cases, span, scenario))


if __name__ == "__main__":
    main()
