"""Goodput under SLO by scenario and policy, as Markdown tables.

python benchmarks/sim/policies.py [--seeds 1,2,3] [--rows "bursty;link-cut"] [--jobs 2]

The rates follow one rule, which knows nothing of `adaptive`. The base rate of a row is the highest
at which the paper's policy, with the planner's threshold and split for this very system, meets both
targets for 90 % of the requests while nothing is disturbed: Poisson arrivals and a whole link, or
the trace as it is. It is found on seed 11. Rows are run at 0.8, 1.0 and 1.2 times it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from prfaas.core.policies import PolicyName
from prfaas.sim.run import find_knee, run
from prfaas.sim.scenario import Scenario, load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"
SEARCH_SEED = 11
OTHER_LOADS = (0.8, 1.2)
FIVE_GBIT = ('plan_settings=["prfaas.0.link.bandwidth=5Gbps"]',)
NUM_LENGTHS = 400
COMPARED = (PolicyName.PAPER, PolicyName.ADAPTIVE)


@dataclass(frozen=True)
class Row:
    """A scenario file with changes, and the undisturbed system whose base rate it uses.

    Attributes:
        file: Name of the scenario.
        changes: Settings of this row.
        base: File and settings of the undisturbed system; None for a trace, which is its own.
        rate_ratio: The row's mean rate, as a share of the base rate.
        base_only: Runs at the base rate without admission alone; it takes too long for more.
    """

    file: str
    changes: tuple[str, ...] = ()
    base: tuple[str, tuple[str, ...]] | None = ("paper-poisson", ())
    rate_ratio: float = 1.0
    base_only: bool = False


ROWS = {
    "poisson": Row("paper-poisson"),
    "bursty": Row("bursty"),
    "link-degraded": Row("link-degraded"),
    "link-cut": Row("link-cut"),
    "prfaas-instance-down": Row("instance-down"),
    # The peak of the day is at the base rate: 1 / (1 + swing).
    "diurnal": Row("diurnal", rate_ratio=1 / 1.5),
    "diurnal, re-roling": Row("diurnal", ("routing.reroling=true",), rate_ratio=1 / 1.5),
    "mooncake": Row("mooncake", base=None),
    "claude-code": Row("claude-code", base=None, base_only=True),
    "scarce-link": Row("scarce-link", FIVE_GBIT, ("scarce-link", FIVE_GBIT)),
    "stale-plan": Row("scarce-link", base=("scarce-link", FIVE_GBIT)),
    "stale-plan, re-roling": Row(
        "scarce-link", ("routing.reroling=true",), ("scarce-link", FIVE_GBIT)
    ),
}


def scenario_of(row: Row) -> Scenario:
    """The row's scenario at its base rate."""
    if row.base is None:
        made = load_scenario(EXAMPLES / f"{row.file}.toml", planned_on(row.file))
        return made.with_rate_scaled(base_scale(row.file))
    rate = base_rate(*row.base) * row.rate_ratio
    settings = [*row.changes, f"workload.rate={rate}"]
    return load_scenario(EXAMPLES / f"{row.file}.toml", settings)


@cache
def base_rate(file: str, changes: tuple[str, ...]) -> float:
    """Highest Poisson rate that the paper's policy holds at 90 %, req/s."""
    settings = [*changes, "workload.rate=1.0", 'workload.duration="1h"']
    return _knee(load_scenario(EXAMPLES / f"{file}.toml", settings))


@cache
def base_scale(file: str) -> float:
    """The same of a trace, as a factor on its own rate."""
    return _knee(load_scenario(EXAMPLES / f"{file}.toml", planned_on(file)))


def _knee(scenario: Scenario) -> float:
    found = find_knee(scenario.with_policy(PolicyName.PAPER).with_seed(SEARCH_SEED), 0.9, 0.02)
    if found is None:
        raise SystemExit(f"{scenario.title}: the paper's policy holds at no rate")
    return found.scale


@cache
def planned_on(file: str) -> tuple[str, ...]:
    """Plan settings from the incremental lengths and outputs that a trace shows at home."""
    simulation = run(
        load_scenario(EXAMPLES / f"{file}.toml").with_policy(PolicyName.LOCAL)
    ).simulation
    new = sorted(r.num_new_tokens for r in simulation.requests)
    outputs = [r.num_output_tokens for r in simulation.requests]
    quantiles = [new[(2 * i + 1) * len(new) // (2 * NUM_LENGTHS)] for i in range(NUM_LENGTHS)]
    # The plan's profiles go from 128 to 131,072 tokens.
    lengths = [float(min(max(length, 128), 131_072)) for length in quantiles]
    settings = [
        "workload.distribution=lengths",
        f"workload.lengths={lengths}",
        f"workload.output_tokens={sum(outputs) / len(outputs)}",
    ]
    return (f"plan_settings={json.dumps(settings)}",)


def goodput(
    scenario: Scenario, policy: PolicyName, load: float, seeds: Sequence[int], name: str
) -> float:
    """Mean over seeds, req/s. Says on stderr what was run."""
    chosen = scenario.with_policy(policy)
    if load != 1.0:
        chosen = chosen.with_rate_scaled(load)
    found = [run(chosen.with_seed(seed)).results for seed in seeds]
    mean = sum(r.goodput for r in found) / len(found)
    share = sum(r.slo_attainment for r in found) / len(found)
    print(json.dumps([name, policy.value, load, round(mean, 4), round(share, 4)]), flush=True)
    return mean


def with_admission(scenario: Scenario) -> Scenario:
    """The same, and what is predicted to be late is refused."""
    routing = replace(scenario.setup.routing, admission=True)
    return replace(scenario, setup=replace(scenario.setup, routing=routing))


def measure(name: str, seeds: Sequence[int]) -> tuple[str, str | None]:
    """A row of the table, and of the one with admission."""
    row = ROWS[name]
    scenario = scenario_of(row)
    found = {p: goodput(scenario, p, 1.0, seeds, name) for p in PolicyName}
    cells = [f"{rate:.3f}" for rate in found.values()]
    cells.append(_gain(found[PolicyName.PAPER], found[PolicyName.ADAPTIVE]))
    if row.base_only:
        return _line(name, [*cells, *["-"] * len(OTHER_LOADS)]), None
    for load in OTHER_LOADS:
        cells.append(_gain(*(goodput(scenario, p, load, seeds, name) for p in COMPARED)))
    refusing = with_admission(scenario)
    pair = [goodput(refusing, p, 1.0, seeds, f"{name} +admission") for p in COMPARED]
    return _line(name, cells), _line(name, [*(f"{rate:.3f}" for rate in pair), _gain(*pair)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput under SLO by scenario and policy.")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rows", default=";".join(ROWS), help="separated by ;")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="rows at a time")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with multiprocessing.Pool(options.jobs) as pool:
        rows = pool.map(partial(measure, seeds=seeds), options.rows.split(";"), chunksize=1)
    loads = [f"at {load}" for load in OTHER_LOADS]
    _print(["scenario", *(p.value for p in PolicyName), "+x", *loads], [row for row, _ in rows])
    _print(["scenario", *(p.value for p in COMPARED), "+x"], [row for _, row in rows if row])


def _print(head: Sequence[str], lines: Sequence[str]) -> None:
    print("", _line(head[0], head[1:]), "|---|" + "---:|" * (len(head) - 1), *lines, sep="\n")


def _line(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _gain(theirs: float, ours: float) -> str:
    """What `ours` has more, and no percentage that says nothing."""
    if theirs <= 0:
        return f"{ours:.3f} : 0"
    return "> 10 x" if ours > 10 * theirs else f"{ours / theirs - 1:+.1%}"


if __name__ == "__main__":
    main()
