"""`prfaas simulate --seeds` and `--sweep`: many runs of a scenario, in parallel."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import click
from rich.table import Table

from prfaas.cli.plan.sweeping import run_all
from prfaas.presentation import console_for
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.run import (
    Interval,
    interval,
    knee_job,
    percentile_interval,
    results_job,
)
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sweeps import SweepJob, SweepPlace

Made = TypeVar("Made")
_COLUMNS = 110  # of output that goes to a file or a pipe


def _ttft_s(key: str) -> Callable[[Results], float]:
    return lambda found: found.time_to_first_token.get(key, float("nan")) / 1e3


FIGURES: dict[str, tuple[str, Callable[[Results], float]]] = {
    "goodput": ("req/s", lambda found: found.goodput),
    "slo_attainment": ("", lambda found: found.slo_attainment),
    "ttft_mean": ("s", _ttft_s("avg")),
    "ttft_p90": ("s", _ttft_s("p90")),
    "ttft_p99": ("s", _ttft_s("p99")),
    "ttft_max": ("s", _ttft_s("max")),
    "rejected_ratio": ("", lambda r: r.outcomes.get("rejected", 0) / max(r.num_requests, 1)),
    "offloaded_ratio": ("", lambda found: found.offloaded_ratio),
}
"""Unit and value of the figures that get an interval."""
_PERCENTILES = {"ttft_p90": 90, "ttft_p99": 99}
"""Of all requests of all seeds."""


@dataclass(frozen=True, slots=True)
class Grid(Generic[Made]):
    """Results by policy, in the order of the seeds."""

    title: str
    seeds: list[int]
    found: dict[str, list[Made]]


def show_seeds(
    scenarios: Mapping[str, Scenario], num_seeds: int, place: SweepPlace, *, as_json: bool
) -> None:
    """Run every policy with consecutive seeds and print means with intervals.

    Raises:
        ConfigError: The scenario is wrong.
    """
    grid = _grid(scenarios, num_seeds, place, results_job)
    intervals = {
        name: {figure: _interval(all_, figure) for figure in FIGURES}
        for name, all_ in grid.found.items()
    }
    if as_json:
        by_policy = {
            name: {figure: asdict(each) for figure, each in figures.items()}
            for name, figures in intervals.items()
        }
        digests = {name: [each.digest for each in all_] for name, all_ in grid.found.items()}
        told = {"title": grid.title, "seeds": grid.seeds, "intervals": by_policy}
        click.echo(json.dumps({**told, "digests": digests}, indent=2))
        return
    out = console_for(_COLUMNS)
    seeds = f"seeds {grid.seeds[0]} to {grid.seeds[-1]}"
    out.print(f"{grid.title}; {seeds}; mean and 95 % interval", soft_wrap=True)
    table = Table("", *intervals, box=None, padding=(0, 2))
    for figure, (unit, _) in FIGURES.items():
        table.add_row(figure, *(_cell(each[figure], unit) for each in intervals.values()))
    out.print(table)


def _interval(found: Sequence[Results], figure: str) -> Interval:
    if (percentile := _PERCENTILES.get(figure)) is not None:
        return percentile_interval([each.ttft_ms / 1e3 for each in found], percentile)
    value = FIGURES[figure][1]
    return interval([value(each) for each in found])


def show_knees(
    scenarios: Mapping[str, Scenario],
    num_seeds: int,
    place: SweepPlace,
    *,
    attainment: float,
    as_json: bool,
) -> None:
    """Find the highest load that holds the targets, under each policy and seed."""
    grid = _grid(scenarios, num_seeds, place, lambda each: knee_job(each, attainment))
    rates = {
        name: [
            0.0 if knee is None else knee.results.num_requests / knee.results.window_s
            for knee in knees
        ]
        for name, knees in grid.found.items()
    }
    means = {name: interval(all_) for name, all_ in rates.items()}
    if as_json:
        told = {
            "attainment": attainment,
            "seeds": grid.seeds,
            "rate_per_s": {name: each.mean or None for name, each in means.items()},
            "rate_per_s_by_seed": rates,
            "digests": {
                name: [None if knee is None else knee.results.digest for knee in knees]
                for name, knees in grid.found.items()
            },
        }
        click.echo(json.dumps(told, indent=2))
        return
    for name, each in means.items():
        said = _cell(each, "req/s", 2) if each.mean else "the targets do not hold at any load"
        click.echo(f"{name}: {said}")


def _grid(
    scenarios: Mapping[str, Scenario],
    num_seeds: int,
    place: SweepPlace,
    job: Callable[[Scenario], SweepJob[Made]],
) -> Grid[Made]:
    first = next(iter(scenarios.values()))
    seeds = list(range(first.seed, first.seed + num_seeds))
    jobs = [job(scenario.with_seed(seed)) for scenario in scenarios.values() for seed in seeds]
    made = iter(run_all(jobs, place))
    found = {name: [next(made) for _ in seeds] for name in scenarios}
    return Grid(first.title, seeds, found)


def _cell(found: Interval, unit: str, digits: int = 3) -> str:
    width = "" if found.half_width is None else f" ± {found.half_width:.{digits}f}"
    return f"{found.mean:.{digits}f}{width} {unit}".rstrip()
