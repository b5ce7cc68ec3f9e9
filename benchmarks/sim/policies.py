"""Goodput and tail by scenario and policy, as Markdown tables, each a share of an upper bound.

python -m benchmarks.sim.policies [--tables grid,rows,...] [--seeds 1,2,3] [--minutes 20]

| table | content |
|---|---|
| grid | abundant and scarce links, plans that fit and stale ones, at 0.6 to 1.4 of capacity |
| grid-declined | the same without admission |
| rows, rows-declined | disturbances, traces and sessions at given rates |
| loops | the short-term loop and changes of roles |
| capacity | highest load of a trace at which 90 % of the requests meet the targets |

The bound is that of `sim/scenario/bound.py`; the best static threshold is the best of seven in
hindsight.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.progress import track

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.bound import bound
from prfaas.sim.scenario.run import find_knee, run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.units import NS_PER_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"
FIVE_GBIT = 'plan_settings=["prfaas.0.link.bandwidth=5Gbps"]'
THRESHOLDS = (500, 2_000, 5_000, 10_000, 20_000, 40_000, 80_000)
LOADS = (0.6, 0.8, 1.0, 1.2, 1.4)
SHARE, SCALE_MAX, SCALE_STEP = 0.9, 16.0, 0.05
"""Share in time at capacity; largest factor of a trace's rate, and how precisely it is found."""
NUM_LENGTHS = 400
"""Quantiles of a trace's lengths that a plan is made from."""
DECLINED = "routing.admission=false"
POLICIES = ("local", "remote", "paper", "best static", "adaptive")
FEW = ("local", "remote", "paper", "adaptive")
STALE_ON_100_GBIT = (FIVE_GBIT, 'link.bandwidth="100Gbps"')


@dataclass(frozen=True)
class Row:
    """A scenario file with changes.

    Attributes:
        file: Name of the scenario.
        changes: Settings of this row.
        runs_itself: A trace: its length is its own.
    """

    file: str
    changes: tuple[str, ...] = ()
    runs_itself: bool = False


GRID = {
    "abundant": (Row("paper-poisson"), 3.17),
    "abundant, stale plan": (Row("paper-poisson", STALE_ON_100_GBIT), 3.17),
    "scarce": (Row("scarce-link", (FIVE_GBIT,)), 2.0),
    "scarce, stale plan": (Row("scarce-link"), 2.0),
}
ROWS = {
    "poisson": Row("paper-poisson", ("workload.rate=2.8125",)),
    "bursty": Row("bursty", ("workload.rate=2.8125",)),
    "link-degraded": Row("link-degraded", ("workload.rate=2.8125",)),
    "link-cut": Row("link-cut", ("workload.rate=2.8125",)),
    "prfaas-instance-down": Row("instance-down", ("workload.rate=2.8125",)),
    "scarce-link": Row("scarce-link", (FIVE_GBIT, "workload.rate=1.75")),
    "stale-plan": Row("scarce-link", ("workload.rate=1.75",)),
    "mooncake, 2.2 x": Row("mooncake", ("workload.rate_scale=2.2",), runs_itself=True),
    "azure code, 1.5 x": Row("azure-code", ("workload.rate_scale=1.5",), runs_itself=True),
    "claude-code, 200 users": Row("claude-code", ("workload.users=200",)),
    "claude-code, 300 users": Row("claude-code", ("workload.users=300",)),
    "claude-code, 400 users": Row("claude-code", ("workload.users=400",)),
}
LOOPS = {
    "poisson": Row("paper-poisson", ("workload.rate=2.8125",)),
    "bursty": Row("bursty", ("workload.rate=2.8125",)),
    "diurnal": Row("diurnal", ("workload.rate=1.875",)),
    "abundant, stale plan, 0.8": Row("paper-poisson", (*STALE_ON_100_GBIT, "workload.rate=2.536")),
    "abundant, stale plan, 1.0": Row("paper-poisson", (*STALE_ON_100_GBIT, "workload.rate=3.17")),
    "scarce-link": Row("scarce-link", (FIVE_GBIT, "workload.rate=1.75")),
    "scarce, stale plan, 0.8": Row("scarce-link", ("workload.rate=1.6",)),
    "scarce, stale plan, 1.0": Row("scarce-link", ("workload.rate=2.0",)),
}
REROLING, SHORT_TERM = "routing.reroling=true", "routing.moving_threshold=true"
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "paper": ("paper", ()),
    "paper, re-roling": ("paper", (REROLING,)),
    "adaptive": ("adaptive", ()),
    "adaptive, short-term loop": ("adaptive", (SHORT_TERM,)),
    "adaptive, re-roling": ("adaptive", (REROLING,)),
    "adaptive, both": ("adaptive", (REROLING, SHORT_TERM)),
}
TRACES = {"mooncake": Row("mooncake", (), True), "azure code": Row("azure-code", (), True)}


@dataclass(frozen=True)
class Cell:
    """Figures of one run: goodput in req/s, TTFT in s."""

    goodput: float
    mean_s: float
    p99_s: float
    longest_s: float


@dataclass(frozen=True)
class Job:
    """One run: a row, changes, a policy and a seed."""

    row: Row
    changes: tuple[str, ...]
    policy: str
    seed: int


def scenario_of(row: Row, changes: Sequence[str], minutes: int) -> Scenario:
    """A row's scenario, cut to so many minutes unless it is a trace."""
    cut = [] if row.runs_itself else [f'workload.duration="{minutes}min"']
    cut += [] if row.runs_itself else ['workload.warmup="3min"']
    return load_scenario(EXAMPLES / f"{row.file}.toml", [*row.changes, *cut, *changes])


def measure(job: Job) -> Cell:
    """Run one job; `best static` takes the best of all thresholds in hindsight."""
    if job.policy != "best static":
        return _run(job, job.policy)
    static = (
        Job(job.row, (*job.changes, f"routing.threshold={t}"), "", job.seed) for t in THRESHOLDS
    )
    return max((_run(each, "paper") for each in static), key=lambda cell: cell.goodput)


def _run(job: Job, policy: str) -> Cell:
    scenario = scenario_of(job.row, job.changes, MINUTES)
    found = run(scenario.with_policy(PolicyName(policy)).with_seed(job.seed)).results
    ttft = found.time_to_first_token
    return Cell(found.goodput, *(ttft[key] / 1e3 for key in ("avg", "p99", "max")))


def limit(job: Job) -> float:
    """The bound of a job's scenario, req/s."""
    return bound(scenario_of(job.row, job.changes, MINUTES).with_seed(job.seed))


def capacity(job: Job) -> float:
    """Highest rate of a trace at which 90 % of its requests meet the targets, req/s."""
    scenario = scenario_of(job.row, job.changes, MINUTES)
    knee = find_knee(scenario.with_policy(PolicyName(job.policy)).with_seed(job.seed))
    return 0.0 if knee is None else knee.results.num_requests / knee.results.window_s


def capacity_limit(job: Job) -> float:
    """Highest rate of a trace at which the bound has 90 % of its requests in time, req/s."""
    scenario = scenario_of(job.row, job.changes, MINUTES).with_seed(job.seed)
    arrived = scenario.requests()
    rate = len(arrived) * NS_PER_S / (arrived[-1].arrived_at_ns + 1)
    low, high = 0.0, SCALE_MAX
    while high - low > SCALE_STEP:
        middle = (low + high) / 2
        served = bound(scenario.with_rate_scaled(middle)) >= SHARE * rate * middle
        low, high = (middle, high) if served else (low, middle)
    return rate * low


MINUTES = 20


@cache
def _interval_factor(num_seeds: int) -> float:
    """Student's t for 95 % of the mean of so many seeds, over the root of their number."""
    from scipy.stats import t

    return float(t.ppf(0.975, num_seeds - 1)) / num_seeds**0.5 if num_seeds > 1 else 0.0


def table(
    jobs: dict[str, tuple[Row, tuple[str, ...]]],
    policies: Sequence[str],
    seeds: Sequence[int],
    pool: multiprocessing.pool.Pool,
) -> list[str]:
    """Lines of a table: goodput of every policy, and the tails of paper and adaptive."""
    runs = [Job(*jobs[n], policy, seed) for n in jobs for policy in policies for seed in seeds]
    limits = [Job(*jobs[name], "", seed) for name in jobs for seed in seeds]
    console = Console(stderr=True)
    cells = list(track(pool.imap(measure, runs), "running", len(runs), console=console))
    bounds = iter(list(track(pool.imap(limit, limits), "bounding", len(limits), console=console)))
    by_job = dict(zip(runs, cells, strict=True))
    lines = []
    for name, (row, changes) in jobs.items():
        most = statistics.mean(next(bounds) for _ in seeds)
        found = {p: [by_job[Job(row, changes, p, seed)] for seed in seeds] for p in policies}
        lines.append(_line(name, found, most))
    head = [*policies, "bound", "adaptive / bound", "/ best of all"]
    head += [f"{p} {what}" for p in ("paper", "adaptive") for what in ("mean", "P99", "longest")]
    return [f"| scenario | {' | '.join(head)} |", "|---|" + "---:|" * len(head), *lines]


def _line(name: str, found: dict[str, list[Cell]], most: float) -> str:
    mean = {p: statistics.mean(c.goodput for c in cells) for p, cells in found.items()}
    ours = found["adaptive"]
    wide = _interval_factor(len(ours))
    spread = wide * (statistics.stdev(c.goodput for c in ours) if len(ours) > 1 else 0.0)
    cells = [f"{rate:.3f}" for policy, rate in mean.items() if policy != "adaptive"]
    cells.append(f"{mean['adaptive']:.3f} ± {spread:.3f}")
    cells += [f"{most:.3f}", f"{mean['adaptive'] / most:.0%}"]
    others = max(rate for policy, rate in mean.items() if policy not in ("adaptive", "best static"))
    cells.append(f"{mean['adaptive'] / others - 1:+.1%}" if others else "-")
    for policy in ("paper", "adaptive"):
        tail = [[c.mean_s, c.p99_s, c.longest_s] for c in found[policy]]
        cells += [f"{statistics.mean(column):.1f}" for column in zip(*tail, strict=True)]
    return f"| {name} | {' | '.join(cells)} |"


def loops(seeds: Sequence[int], pool: multiprocessing.pool.Pool) -> list[str]:
    """Lines of a table: goodput, and mean TTFT behind it, with and without the loops."""
    runs = [
        Job(row, changes, policy, seed)
        for row in LOOPS.values()
        for policy, changes in SETTINGS.values()
        for seed in seeds
    ]
    console = Console(stderr=True)
    cells = iter(list(track(pool.imap(measure, runs), "running", len(runs), console=console)))
    lines = [f"| scenario | {' | '.join(SETTINGS)} |", "|---|" + "---:|" * len(SETTINGS)]
    for name in LOOPS:
        shown = []
        for _ in SETTINGS:
            found = [next(cells) for _ in seeds]
            goodput = statistics.mean(cell.goodput for cell in found)
            shown.append(f"{goodput:.3f} ({statistics.mean(cell.mean_s for cell in found):.1f} s)")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def planned_on(row: Row) -> tuple[str, ...]:
    """Plan settings from the incremental lengths and outputs that a trace shows locally."""
    scenario = scenario_of(row, (), MINUTES).with_policy(PolicyName.LOCAL)
    requests = run(scenario).simulation.requests
    new = sorted(r.num_new_tokens for r in requests)
    # The plan's profiles go from 128 to 131,072 tokens.
    at = ((2 * i + 1) * len(new) // (2 * NUM_LENGTHS) for i in range(NUM_LENGTHS))
    settings = [
        "workload.distribution=lengths",
        f"workload.lengths={[float(min(max(new[i], 128), 131_072)) for i in at]}",
        f"workload.output_tokens={statistics.mean(r.num_output_tokens for r in requests)}",
    ]
    return (f"plan_settings={json.dumps(settings)}",)


def capacities(seeds: Sequence[int], pool: multiprocessing.pool.Pool) -> list[str]:
    """Lines of a table: capacities of the traces, with the case study's plan and with their own."""
    own = dict(zip(TRACES, pool.map(planned_on, TRACES.values()), strict=True))
    plans = {name: {"the case study's plan": (), "its own plan": own[name]} for name in TRACES}
    admission = {"with admission": (), "without": (DECLINED,)}
    cases = {
        f"{name}, {planned}, {how}": [
            Job(row, (*plan, *changes), policy, seeds[0]) for policy in ("paper", "adaptive")
        ]
        for name, row in TRACES.items()
        for planned, plan in plans[name].items()
        for how, changes in admission.items()
    }
    rates = iter(pool.map(capacity, [job for pair in cases.values() for job in pair], 1))
    limits = pool.map(capacity_limit, [ours for _, ours in cases.values()], 1)
    lines = ["| trace | paper | adaptive | ratio | bound |", "|---|---:|---:|---:|---:|"]
    for name, most in zip(cases, limits, strict=True):
        paper, ours = next(rates), next(rates)
        lines.append(f"| {name} | {paper:.2f} | {ours:.2f} | {ours / paper:.2f}x | {most:.2f} |")
    return lines


def main() -> None:
    global MINUTES
    parser = argparse.ArgumentParser(description="Goodput under SLO by scenario and policy.")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--tables", default="grid,grid-declined,rows,rows-declined,loops,capacity")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--minutes", type=int, default=MINUTES, help="of synthetic arrivals")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    options = parser.parse_args()
    seeds, MINUTES = [int(seed) for seed in options.seeds.split(",")], options.minutes
    grid = {
        f"{name}, {load}": (row, (f"workload.rate={rate * load:g}",))
        for name, (row, rate) in GRID.items()
        for load in LOADS
    }
    rows: dict[str, tuple[Row, tuple[str, ...]]] = {name: (row, ()) for name, row in ROWS.items()}
    # A run leaves cycles of some 10 MB behind, which are collected seldom: processes end early.
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=4) as pool:
        for name in options.tables.split(","):
            if name == "loops":
                lines = loops(seeds, pool)
            elif name == "capacity":
                lines = capacities(seeds, pool)
            else:
                kind, _, declined = name.partition("-")
                changes = (DECLINED,) if declined else ()
                jobs = {
                    n: (row, (*own, *changes))
                    for n, (row, own) in (grid if kind == "grid" else rows).items()
                    if options.only in n
                }
                lines = table(jobs, FEW if declined else POLICIES, seeds, pool)
            print(f"{name}:", "", *lines, "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
