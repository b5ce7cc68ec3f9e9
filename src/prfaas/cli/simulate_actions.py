"""What `prfaas simulate` does; apart, because its imports take most of a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.core.policies import PolicyName
from prfaas.sim.results import Results
from prfaas.sim.run import find_knee, run
from prfaas.sim.scenario import Scenario, load_scenario

_DEFAULT_WIDTH = 110  # of output that goes to a file or a pipe


def show_runs(scenarios: Mapping[str, Scenario], *, as_json: bool) -> None:
    """Run a scenario under each policy."""
    found = {name: _with_progress(name, scenario) for name, scenario in scenarios.items()}
    first = next(iter(scenarios.values()))
    if as_json:
        runs = {name: results.as_dict() for name, results in found.items()}
        said = {"title": first.title, "seed": first.seed, "notes": first.notes, "runs": runs}
        click.echo(json.dumps(said, indent=2))
        return
    console = _console()
    console.print(f"{first.title}; seed {first.seed}; " + "; ".join(first.notes), soft_wrap=True)
    console.print(_table(found))
    for name, results in found.items():
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in results.decisions.items())
        console.print(f"{name}: {reasons}; digest {results.digest[:12]}", soft_wrap=True)


def show_knees(scenarios: Mapping[str, Scenario], *, attainment: float, as_json: bool) -> None:
    """Find the highest load that holds the targets, under each policy."""
    found = {name: find_knee(scenario, attainment) for name, scenario in scenarios.items()}
    rates = {
        name: None if knee is None else knee.results.num_requests / knee.results.window_s
        for name, knee in found.items()
    }
    if as_json:
        click.echo(json.dumps({"attainment": attainment, "rate_per_s": rates}, indent=2))
        return
    for name, rate in rates.items():
        said = "the targets do not hold at any load" if rate is None else f"{rate:.2f} req/s"
        click.echo(f"{name}: {said}")


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


def _with_progress(name: str, scenario: Scenario) -> Results:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"simulating {name}", total=None)
        return run(
            scenario, lambda done, total: progress.update(task, completed=done, total=total)
        ).results


def _table(found: dict[str, Results]) -> Table:
    table = Table("", *found, box=None, padding=(0, 2))
    for label, cell in _ROWS:
        table.add_row(label, *(cell(results) for results in found.values()))
    return table


def _ms(spread: dict[str, float], key: str) -> str:
    return f"{spread[key] / 1e3:.2f} s" if key in spread else "-"


_ROWS: tuple[tuple[str, Callable[[Results], str]], ...] = (
    ("requests", lambda r: f"{r.num_requests:,}"),
    ("finished", lambda r: f"{r.outcomes.get('finished', 0):,}"),
    ("rejected", lambda r: f"{r.outcomes.get('rejected', 0):,}"),
    ("failed", lambda r: f"{r.outcomes.get('failed', 0):,}"),
    ("goodput", lambda r: f"{r.goodput:.3f} req/s"),
    ("SLO attainment", lambda r: f"{r.slo_attainment:.1%}"),
    ("TTFT mean", lambda r: _ms(r.time_to_first_token, "avg")),
    ("TTFT P90", lambda r: _ms(r.time_to_first_token, "p90")),
    ("TTFT P99", lambda r: _ms(r.time_to_first_token, "p99")),
    ("offloaded", lambda r: f"{r.offloaded_ratio:.1%}"),
    ("prefix hits", lambda r: f"{r.prefix_hit_ratio:.1%}"),
    ("egress mean", lambda r: f"{r.egress['avg_bits_per_s'] / 1e9:.2f} Gbit/s"),
    ("egress P99 of 1 s", lambda r: f"{r.egress['p99_bits_per_s'] / 1e9:.2f} Gbit/s"),
    ("PD-P busy", lambda r: f"{r.utilisation['pd_prefill']:.1%}"),
    ("PrfaaS busy", lambda r: f"{r.utilisation['prfaas_prefill']:.1%}"),
    ("decode slots", lambda r: f"{r.utilisation['decode_slots']:.1%}"),
    ("recomputed", lambda r: f"{r.num_recomputed:,}"),
)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_DEFAULT_WIDTH)
    return console
