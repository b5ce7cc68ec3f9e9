"""Actions of `prfaas simulate`, in a separate module since imports take most of a second."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from prfaas.cli.plan.sweeping import run_all
from prfaas.core.routing.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.presentation import console_for, recorded_page, write_file
from prfaas.sim.report.events import events_of
from prfaas.sim.report.run_figures import (
    RunFigures,
    comparison_table,
    figures_of,
    print_report,
    series_of,
)
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.bound import bound
from prfaas.sim.scenario.run import (
    Interval,
    ScenarioRun,
    interval,
    knee_job,
    percentile_interval,
    results_job,
    run,
)
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sweeps import SweepJob, SweepPlace

_COLUMNS = 110  # of output that goes to a file or a pipe


@dataclass(frozen=True, slots=True)
class Output:
    """Outputs of the runs."""

    as_json: bool = False
    report: Path | None = None
    """Place where the HTML report goes, if one is wanted."""
    series: Path | None = None
    """Place where the time series go, if they are wanted."""
    events: Path | None = None
    """Place where the events go, if they are wanted."""
    command: str = ""
    """The command that makes the same again."""
    with_bound: bool = False
    """Print the offline bound of the goodput."""

    @property
    def files(self) -> tuple[Path | None, ...]:
        """Files to write, None where one is not wanted."""
        return self.report, self.series, self.events


def command_of(
    file: Path, settings: Sequence[str], policies: Sequence[str], seed: int | None
) -> str:
    """The command line of a run."""
    words = ["prfaas", "simulate", str(file)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += [word for policy in policies for word in ("--policy", policy)]
    words += [] if seed is None else ["--seed", str(seed)]
    return shlex.join(words)


def show_runs(scenarios: Mapping[str, Scenario], output: Output, place: SweepPlace) -> None:
    """Run a scenario under each policy, several at a time; ConfigError if a file cannot be
    written."""
    _check(output)
    first = next(iter(scenarios.values()))
    most = bound(first) if output.with_bound else None
    drawn, kept = {}, {}
    if len(scenarios) == 1 or output.events is not None:
        # Events need all of a run, which does not travel between processes.
        for name, scenario in scenarios.items():
            done = _with_progress(name, scenario)
            drawn[name] = figures_of(done)
            if output.events is not None:
                kept[name] = done
    else:
        jobs = [SweepJob(name, partial(_drawn, each)) for name, each in scenarios.items()]
        drawn = dict(zip(scenarios, run_all(jobs, place), strict=True))
    found = {name: each.results for name, each in drawn.items()}
    _write(output, first, drawn, kept, _verdict(found))
    for name, results in found.items():
        if warning := warning_of(results):
            click.echo(f"prfaas: {name}: {warning}", err=True)
    if output.as_json:
        runs = {name: results.as_dict() for name, results in found.items()}
        warnings = {name: text for name, r in found.items() if (text := warning_of(r))}
        said = {"title": first.title, "seed": first.seed, "notes": first.notes, "runs": runs}
        said |= {"warnings": warnings}
        said |= {} if most is None else {"goodput_bound": most}
        click.echo(json.dumps(said, indent=2))
        return
    console = console_for(_COLUMNS)
    console.print(f"{first.title}; seed {first.seed}; " + "; ".join(first.notes), soft_wrap=True)
    console.print(comparison_table(found))
    if most is not None:
        shares = ", ".join(f"{name} {r.goodput / most:.1%}" for name, r in found.items() if most)
        console.print(f"offline bound of the goodput {most:.3f} req/s: {shares}", soft_wrap=True)
    for path in output.files:
        if path is not None:
            console.print(f"wrote {path}", soft_wrap=True, markup=False)
    for name, results in found.items():
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in results.decisions.items())
        console.print(f"{name}: {reasons}; digest {results.digest[:12]}", soft_wrap=True)


def _drawn(scenario: Scenario) -> RunFigures:
    return figures_of(run(scenario))


def _write(
    output: Output,
    scenario: Scenario,
    drawn: Mapping[str, RunFigures],
    kept: Mapping[str, ScenarioRun],
    verdict: str,
) -> None:
    """Write the files that are wanted, from figures and runs by policy."""
    if output.report is not None:
        origin = {"command": output.command, "prfaas": version("prfaas")}
        page = recorded_page(
            partial(print_report, scenario, drawn, origin), scenario.title, verdict
        )
        write_file("--report", output.report, page)
    if output.series is not None:
        write_file("--series", output.series, json.dumps(series_of(scenario.title, drawn)))
    if output.events is not None:
        write_file("--events", output.events, "".join(events_of(scenario.title, kept)))


def _verdict(found: Mapping[str, Results]) -> str:
    """Goodput of each policy, in a sentence."""
    parts = (f"{name} {results.goodput:.3f} req/s in time" for name, results in found.items())
    return "Carried: " + "; ".join(parts) + "."


def warning_of(results: Results) -> str:
    """Cause for which the figures of a run mean nothing; "" without one."""
    finished, came = results.outcomes.get("finished", 0), results.num_requests
    if not came:
        return "no request arrived in the measured window; its figures say nothing"
    if not finished:
        outcomes = ", ".join(f"{count:,} {what}" for what, count in results.outcomes.items())
        return (
            f"none of {came:,} requests finished ({outcomes}), so there are no latencies; check "
            "that an instance can serve the prompts, slo.ttft, the threshold and the load"
        )
    if not results.good_request_count:
        return (
            f"no request of {came:,} met its targets; the load is beyond capacity, or a target is"
        )
    return ""


def load_scenarios(
    file: Path, settings: Sequence[str], policies: Sequence[str], seed: int | None
) -> dict[str, Scenario]:
    """The scenario of a file under each policy, by the policy's name; ConfigError if the scenario
    is wrong."""
    scenario = load_scenario(file, settings)
    if seed is not None:
        scenario = scenario.with_seed(seed)
    names = policies or (scenario.setup.routing.policy.value,)
    return {name: scenario.with_policy(PolicyName(name)) for name in names}


def _check(output: Output) -> None:
    """Before a run of minutes: can its files be written at all?"""
    for path in output.files:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: the directory {path.absolute().parent} is not there")


def _with_progress(name: str, scenario: Scenario) -> ScenarioRun:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"simulating {name}", total=None)
        return run(scenario, lambda done, total: progress.update(task, completed=done, total=total))


Made = TypeVar("Made")


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
    """Run every policy with consecutive seeds and print means with intervals; ConfigError if the
    scenario is wrong."""
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
