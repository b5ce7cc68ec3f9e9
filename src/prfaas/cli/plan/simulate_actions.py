"""Actions of `prfaas simulate`, in a separate module since imports take most of a second."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prfaas.core.routing.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.presentation import console_for, recorded_page, write_file
from prfaas.sim.report.run_figures import comparison_table
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.bound import bound
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario

_COLUMNS = 110  # of output that goes to a file or a pipe


@dataclass(frozen=True, slots=True)
class Output:
    """Outputs of the runs.

    Attributes:
        report: Where the HTML report goes, if one is wanted.
        series: Where the time series go, if they are wanted.
        command: The command that makes the same again.
        with_bound: Print the offline bound of the goodput.
    """

    as_json: bool = False
    report: Path | None = None
    series: Path | None = None
    command: str = ""
    with_bound: bool = False


def command_of(
    file: Path, settings: Sequence[str], policies: Sequence[str], seed: int | None
) -> str:
    """The command line of a run."""
    words = ["prfaas", "simulate", str(file)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += [word for policy in policies for word in ("--policy", policy)]
    words += [] if seed is None else ["--seed", str(seed)]
    return shlex.join(words)


def show_runs(scenarios: Mapping[str, Scenario], output: Output) -> None:
    """Run a scenario under each policy.

    Raises:
        ConfigError: A file cannot be written.
    """
    _check(output)
    first = next(iter(scenarios.values()))
    most = bound(first) if output.with_bound else None
    found, drawn = {}, {}
    for name, scenario in scenarios.items():
        done = _with_progress(name, scenario)
        found[name] = done.results
        if output.report is not None or output.series is not None:
            from prfaas.sim.report.run_figures import figures_of

            drawn[name] = figures_of(done)
    if output.report is not None:
        from prfaas.sim.report.page import print_report

        origin = {"command": output.command, "prfaas": version("prfaas")}
        page = recorded_page(partial(print_report, first, drawn, origin))
        write_file("--report", output.report, page)
    if output.series is not None:
        from prfaas.sim.report.run_figures import series_of

        write_file("--series", output.series, json.dumps(series_of(first.title, drawn)))
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
    for path in (output.report, output.series):
        if path is not None:
            console.print(f"wrote {path}", soft_wrap=True, markup=False)
    for name, results in found.items():
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in results.decisions.items())
        console.print(f"{name}: {reasons}; digest {results.digest[:12]}", soft_wrap=True)


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
    """The scenario of a file under each policy, by the policy's name.

    Raises:
        ConfigError: The scenario is wrong.
    """
    scenario = load_scenario(file, settings)
    if seed is not None:
        scenario = scenario.with_seed(seed)
    names = policies or (scenario.setup.routing.policy.value,)
    return {name: scenario.with_policy(PolicyName(name)) for name in names}


def _check(output: Output) -> None:
    """Before a run of minutes: can its files be written at all?"""
    for path in (output.report, output.series):
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
        return run(
            scenario,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
