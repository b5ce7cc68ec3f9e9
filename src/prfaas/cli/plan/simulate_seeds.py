"""`prfaas simulate --seeds`: the same scenario over several seeds, with intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from prfaas.cli.common.console import console_for
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sim.scenario.seeds import Interval, SeedRun, interval, run_seeds

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


def show_seeds(
    scenarios: dict[str, Scenario],
    file: Path,
    settings: Sequence[str],
    num_seeds: int,
    *,
    as_json: bool,
) -> None:
    """Run every policy with consecutive seeds and print means with intervals.

    Raises:
        ConfigError: The scenario is wrong.
    """
    first = next(iter(scenarios.values()))
    seeds = range(first.seed, first.seed + num_seeds)
    runs = [SeedRun(file, tuple(settings), name, seed) for name in scenarios for seed in seeds]
    console = Console(stderr=True)
    progress = track(run_seeds(runs), "simulating", len(runs), console=console, transient=True)
    found: dict[str, list[Results]] = {name: [] for name in scenarios}
    for each, results in progress:
        found[each.policy].append(results)
    intervals = {
        name: {figure: interval([value(r) for r in all_]) for figure, (_, value) in FIGURES.items()}
        for name, all_ in found.items()
    }
    if as_json:
        by_policy = {
            name: {figure: asdict(each) for figure, each in figures.items()}
            for name, figures in intervals.items()
        }
        told = {"title": first.title, "seeds": list(seeds), "intervals": by_policy}
        click.echo(json.dumps(told, indent=2))
        return
    out = console_for(_COLUMNS)
    said = f"{first.title}; seeds {seeds[0]} to {seeds[-1]}; mean and 95 % interval"
    out.print(said, soft_wrap=True)
    table = Table("", *intervals, box=None, padding=(0, 2))
    for figure, (unit, _) in FIGURES.items():
        table.add_row(figure, *(_cell(each[figure], unit) for each in intervals.values()))
    out.print(table)


def _cell(found: Interval, unit: str) -> str:
    width = "" if found.half_width is None else f" ± {found.half_width:.3f}"
    return f"{found.mean:.3f}{width} {unit}".rstrip()
