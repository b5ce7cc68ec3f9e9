"""`prfaas simulate`: the same decisions, on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import click

from prfaas.cli.common.options import FILE, SCENARIO
from prfaas.cli.plan.sweeping import place_options

_POLICIES = ("local", "remote", "paper", "observed", "adaptive", "cost")


@click.command()
@click.argument("scenario", type=SCENARIO)
@click.option("--set", "settings", multiple=True, metavar="A.B=V", help="Change one setting.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(_POLICIES),
    help="Routing policy; several are compared on the same requests.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of arrivals and lengths.")
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1, 100),
    help="Number of consecutive seeds to run in parallel; prints means and 95 % intervals.",
)
@click.option("--sweep", is_flag=True, help="Find the highest load that holds the targets.")
@click.option(
    "--attainment",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    help="Share of requests that have to meet every target, for --sweep.",
)
@click.option(
    "--bound",
    "with_bound",
    is_flag=True,
    help="Print the goodput that no policy exceeds, from all arrivals known in advance.",
)
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--report", type=FILE, help="Write one HTML file without external resources.")
@click.option("--series", type=FILE, help="Write time series for the console's replay, as JSON.")
@click.option(
    "--events",
    type=FILE,
    help="Write a line for each request and fault, for the page of `prfaas learn`.",
)
def simulate(
    *,
    scenario: Path,
    settings: tuple[str, ...],
    policies: tuple[str, ...],
    seed: int | None,
    num_seeds: int | None,
    sweep: bool,
    attainment: float,
    with_bound: bool,
    num_workers: int | None,
    ray_address: str | None,
    as_json: bool,
    report: Path | None,
    series: Path | None,
    events: Path | None,
) -> None:
    """Run a scenario on a virtual clock, with the policies that serve traffic.

    SCENARIO is a TOML file: a plan file with clusters and model, the workload, and failures; see
    docs/simulator.md.

    \b
    Examples:
      prfaas simulate examples/sim/paper-poisson.toml
      prfaas simulate examples/sim/link-cut.toml --policy paper --policy adaptive
      prfaas simulate examples/sim/bursty.toml --set workload.rate=2.8 --seed 7 --json
      prfaas simulate examples/sim/link-cut.toml --policy paper --policy adaptive --report cut.html
      prfaas simulate examples/sim/link-cut.toml --series cut.json --events cut.jsonl
      prfaas simulate examples/sim/scarce-link.toml --sweep
      prfaas simulate examples/sim/bursty.toml --bound
      prfaas simulate examples/sim/bursty.toml --policy paper --policy adaptive --seeds 5
      prfaas simulate examples/sim/scarce-link.toml --sweep --seeds 5 --ray 10.0.0.5:6379
    """
    if (num_seeds is not None or sweep) and (report or series or events):
        option, takes = ("--sweep", "show one load") if sweep else ("--seeds", "take one seed")
        raise click.UsageError(f"{option} makes many runs; --report, --series and --events {takes}")
    if with_bound and (sweep or num_seeds is not None):
        raise click.UsageError("--bound is of one run; leave out --sweep and --seeds")
    from prfaas.cli.plan import simulate_actions as actions

    scenarios = actions.load_scenarios(scenario, settings, policies, seed)
    from prfaas.sweeps import SweepPlace

    count, place = num_seeds or 1, SweepPlace(num_workers, ray_address)
    if sweep or num_seeds is not None:
        if sweep:
            actions.show_knees(scenarios, count, place, attainment=attainment, as_json=as_json)
        else:
            actions.show_seeds(scenarios, count, place, as_json=as_json)
        return
    if len(scenarios) == 1 and (num_workers is not None or ray_address is not None):
        raise click.UsageError(
            "--jobs and --ray belong to --seeds, --sweep or several policies; add one"
        )
    command = actions.command_of(scenario, settings, policies, seed)
    output = actions.Output(as_json, report, series, events, command, with_bound)
    actions.show_runs(scenarios, output, place)
