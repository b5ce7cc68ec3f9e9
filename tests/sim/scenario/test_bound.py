"""The bound that policies are judged by: no run is above it, and by hand it is exact."""

from __future__ import annotations

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.bound import bound
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rate", [2.0, 4.5])
@pytest.mark.parametrize("policy", PolicyName)
def test_no_policy_is_above_the_bound(policy: PolicyName, rate: float) -> None:
    settings = [f"workload.rate={rate}", 'workload.duration="8min"', 'workload.warmup="1min"']
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml", settings).with_policy(policy)
    most = bound(scenario)
    assert run(scenario).results.goodput <= most * (1 + 1e-9)
    assert most <= rate * 1.1


def test_with_room_for_all_the_bound_is_what_can_be_in_time_alone() -> None:
    settings = ["workload.rate=0.2", 'workload.duration="8min"', 'workload.warmup="0s"']
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml", settings)
    count = len(scenario.requests())
    assert bound(scenario) == pytest.approx(count / 480, rel=0.02)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", [PolicyName.PAPER, PolicyName.ADAPTIVE])
def test_in_a_closed_loop_no_policy_is_above_the_arrivals_of_a_system_without_queues(
    policy: PolicyName,
) -> None:
    settings = ["workload.users=200", 'workload.duration="8min"', 'workload.warmup="0s"']
    scenario = load_scenario(EXAMPLES / "claude-code.toml", settings).with_policy(policy)
    found, most = run(scenario).results, bound(scenario)
    assert found.goodput <= most * (1 + 1e-9)
    assert found.goodput > 0.5 * most
