"""The market in simulated runs: prices of the day, revocations, comparison orders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.market.__main__ import run
from benchmarks.market.orders import per_gpu_hour, time_to_first_token
from prfaas.core.market.choice import total
from prfaas.core.routing.decision import Path
from prfaas.core.routing.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import check
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import Setup
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES

FOUR = EXAMPLES / "four-clusters.toml"
SHORT = ['workload.duration="20min"', "workload.rate=1.0"]
REVOKED = [
    *SHORT,
    'revocation.0.at="5min"',
    'revocation.0.duration="5min"',
    'revocation.0.notice="60s"',
]


def test_a_request_in_time_costs_least_by_cost() -> None:
    """At equal attainment, 0.9 times of the cheapest first and of the fastest first at most."""
    scenario = load_scenario(FOUR, SHORT)
    ours, _ = run(scenario, total, keeps=True)
    for order in (per_gpu_hour, time_to_first_token):
        other, _ = run(scenario, order, keeps=False)
        assert ours.slo_attainment >= other.slo_attainment
        price = other.price["per_request_in_time"]
        assert ours.price["per_request_in_time"] <= 0.9 * price


def test_late_requests_go_where_they_are_least_late() -> None:
    """A PD cluster that is slower and dearer is no place for all that misses the target."""
    near = ['workload.duration="10min"', "workload.rate=2.6", 'slo.ttft="6s"']
    buys = ['routing.policy="cost"', "routing.admission=false", "placement.second_price=0.0005"]
    found, market = run(load_scenario(EXAMPLES / "bursty.toml", [*near, *buys]), total, keeps=True)
    assert found.time_to_first_token["p99"] <= 30e3
    assert sum(market.gpu_cost.values()) <= 12.0


def test_revoked_capacity_is_left_before_it_goes() -> None:
    """No request of a cluster that was announced to leave has to leave its route."""
    simulation = Simulation(*_parts(REVOKED))
    simulation.run()
    check(simulation)
    assert not simulation.reactions.fallbacks
    at_ns = [
        request.arrived_at_ns / NS_PER_S
        for request in simulation.requests
        if request.decision is not None
        and request.decision.path is Path.REMOTE
        and request.decision.choice is not None
        and request.decision.choice.best is not None
        and request.decision.choice.best.offer.cluster == "spot"
    ]
    used = [sum(start <= at < start + 60 for at in at_ns) for start in (180, 240, 300, 540, 660)]
    assert all(used[each] for each in (0, 1, 4)), "used before, within the notice, and after"
    assert used[2:4] == [0, 0], "not used while it is away"


def test_the_cluster_follows_the_prices_of_the_day() -> None:
    night = _sent([*SHORT])
    day = _sent([*SHORT, "prices.east.gpu_hour=9.0", "prices.west.gpu_hour=0.5"])
    assert night["east"] > night["west"]
    assert day["west"] > day["east"]


def test_prices_change_no_run_of_another_policy() -> None:
    scenario = load_scenario(FOUR, ['workload.duration="5min"']).with_policy(PolicyName.ADAPTIVE)
    priced = Simulation(scenario.setup, scenario.requests())
    setup = replace(scenario.setup, market=None)
    usual = Simulation(setup, scenario.requests())
    for simulation in (priced, usual):
        simulation.run()
    first = [request.first_token_at_ns for request in priced.requests]
    assert first == [request.first_token_at_ns for request in usual.requests]
    market = priced.front.dispatcher.market
    assert market is not None
    assert market.spent > 0
    assert usual.front.dispatcher.market is None


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("prices.moon.gpu_hour=1.0", r"prices\.moon: there is no cluster"),
        ('revocation.0.cluster="moon"', "revocation of cluster 'moon'"),
        ("prices.east.gpu_hour=-1.0", r"prices\.east\.gpu_hour"),
    ],
)
def test_what_is_wrong_is_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_scenario(FOUR, [setting])


def _parts(settings: list[str]) -> tuple[Setup, list[Request]]:
    scenario = load_scenario(FOUR, settings)
    return scenario.setup, scenario.requests()


def _sent(settings: list[str]) -> dict[str, int]:
    simulation = Simulation(*_parts(settings))
    simulation.run()
    market = simulation.front.dispatcher.market
    assert market is not None
    return market.num_sent
