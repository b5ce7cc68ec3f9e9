"""The paper's case study at growing distance: the planner's answer, the map's and the simulator's.

    python -m benchmarks.fit.distance [--requests 4000] [--seeds 2]

Prints the table of docs/results/distance.md. Each row changes the round trip (and the loss) of the
link of 100 Gbit/s. The simulator runs the planner's settings at 90 % of their rate.
"""

from __future__ import annotations

import argparse
from pathlib import Path as File
from statistics import fmean

from prfaas.core.transfer.tcp_goodput import TcpEnds, TcpPath
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.fit_map.point import PathPlans, at
from prfaas.sim.sizing import trial_of, try_out

CASE = File(__file__).parents[2] / "examples" / "plan" / "paper-case-study.toml"
LOAD = 0.9
PATHS = (
    ("2ms", 0.0),
    ("40ms", 0.0),
    ("80ms", 0.0),
    ("120ms", 0.0),
    ("160ms", 0.0),
    ("200ms", 0.0),
    ("300ms", 0.0),
    ("40ms", 0.01),
    ("80ms", 0.001),
)


def line(*cells: str) -> None:
    """Print a row."""
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    plans = PathPlans(load_question(CASE).problem, TcpEnds(0))
    line(
        *("round trip, loss", "link carries", "verdict", "gain", "map", "pays from"),
        *("Λ", "t", "offered", "simulated", "P90"),
    )
    line(*["---"] * 11)
    for rtt, loss in PATHS:
        settings = [f'prfaas.0.link.rtt="{rtt}"', f"prfaas.0.link.loss={loss}"]
        question = load_question(CASE, settings)
        [cluster] = question.problem.prfaas
        plan = make_plan(question)
        found, path = plan.exact.prfaas.operation, TcpPath(100e9, cluster.link.rtt_s, loss)
        even, offered = plan.break_even_bits_per_s, LOAD * found.rate_per_s
        runs = [
            try_out(trial_of(question.problem, found, offered, arguments.requests, seed))
            for seed in range(arguments.seeds)
        ]
        line(
            f"{rtt}, {loss:.1%}",
            f"{cluster.goodput_bits_per_s / 1e9:.1f} Gbit/s",
            plan.verdict.answer.value,
            f"{plan.exact.gain:+.1%}",
            f"{plans.gain(path):+.1%}, from {at(plans, path).text}",
            "never" if even is None else f"{even / 1e9:.1f} Gbit/s",
            f"{found.rate_per_s:.2f}",
            f"{found.whole_threshold:,}",
            f"{fmean(run.arrived_per_s for run in runs):.2f}",
            f"{fmean(run.carried_per_s for run in runs):.2f}",
            f"{fmean(run.ttft_p90_s for run in runs):.1f} s",
        )


if __name__ == "__main__":
    main()
