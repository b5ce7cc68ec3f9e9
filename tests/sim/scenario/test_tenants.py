"""Tenants under overload: whoever asks for ten times as much gets no more than its share."""

from __future__ import annotations

import pytest

from prfaas.sim.results.summary import jain_index
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES

OVERLOAD = [
    "workload.rate=9",
    'workload.duration="20min"',
    'workload.warmup="2min"',
    "workload.tenants={greedy=10, b=2, c=2}",
    "routing.admission=true",
]


def simulated(*settings: str) -> ScenarioRun:
    return run(load_scenario(EXAMPLES / "paper-poisson.toml", [*OVERLOAD, *settings]))


def test_a_tenant_that_sends_ten_times_as_much_takes_no_more_than_its_share() -> None:
    # Three times what the system sustains; b and c ask for 1.3 req/s each, a third of it is 1.1.
    found = simulated().results
    let_in = {name: row["prefill_s"] for name, row in found.tenants.items()}
    third = sum(let_in.values()) / 3
    assert all(share == pytest.approx(third, rel=0.15) for share in let_in.values())
    assert found.jain_index > 0.98
    assert found.goodput > 2.5


def test_weights_shift_the_shares() -> None:
    found = simulated("routing.weights={greedy=2.0}").results
    let_in = {name: row["prefill_s"] for name, row in found.tenants.items()}
    assert let_in["greedy"] / let_in["b"] == pytest.approx(2.0, rel=0.2)
    assert found.jain_index > 0.97


@pytest.mark.parametrize(("shares", "index"), [([1.0] * 4, 1.0), ([5.0, 0.0], 0.5), ([], 1.0)])
def test_jains_index(shares: list[float], index: float) -> None:
    assert jain_index(shares) == pytest.approx(index)
