"""A simulated day of the market: cost of a request in time, by the order of the offers.

python -m benchmarks.market [--scenario FILE] [--duration 24h] [--seeds 1,2,3]

Every order chooses among the same offers: clusters that are ready, stay, and are in time. Only
"cost" keeps its incumbents (hysteresis).
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.market.orders import ORDERS, Order
from prfaas.core.market.market import Market
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.columns import columns_of
from prfaas.sim.results.invariants import check
from prfaas.sim.results.summary import Results, summarise
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario

SCENARIO = Path(__file__).parents[2] / "examples" / "sim" / "four-clusters.toml"


def run(scenario: Scenario, order: Order, *, keeps: bool) -> tuple[Results, Market]:
    """Simulate with an order; `keeps` leaves the hysteresis as it is."""
    simulation = Simulation(scenario.setup, scenario.requests())
    market = simulation.front.dispatcher.market
    assert market is not None
    market.order = order
    market.hysteresis = market.hysteresis if keeps else 0.0
    simulation.run()
    columns = columns_of(simulation.requests)
    check(simulation, columns)
    end_ns = scenario.end_ns or simulation.clock.now_ns
    return summarise(simulation, start_ns=0, end_ns=end_ns, columns=columns), market


@click.command()
@click.option("--scenario", type=click.Path(exists=True, path_type=Path), default=SCENARIO)
@click.option("--duration", default="24h", show_default=True)
@click.option("--seeds", default="1,2,3", show_default=True)
def main(scenario: Path, duration: str, seeds: str) -> None:
    """Print a table, a row for each seed and order."""
    loaded = load_scenario(scenario, [f"workload.duration={duration}"])
    click.echo(
        "| seed | order | in time | cost of a request in time | to `cost` | TTFT mean | sent |"
    )
    click.echo("|---|---|---|---|---|---|---|")
    for seed in map(int, seeds.split(",")):
        base = 0.0
        for name, order in ORDERS.items():
            found, market = run(loaded.with_seed(seed), order, keeps=name == "cost")
            price = found.price["per_request_in_time"]
            base = base or price
            sent = ", ".join(f"{n} {count:,}" for n, count in market.num_sent.items() if count)
            mean_s = found.time_to_first_token["avg"] / 1e3
            click.echo(
                f"| {seed} | {name} | {found.slo_attainment:.2%} | {price:.6f} | "
                f"{price / base:.3f} | {mean_s:.2f} s | {sent} |"
            )


if __name__ == "__main__":
    main()
