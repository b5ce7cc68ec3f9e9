"""Fallbacks in a run: prompts that are late or lost go where there is room."""

from __future__ import annotations

import pytest

from prfaas.core.request.fleet import PREFILL_TIMEOUT_NS
from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES

DECLINED = "routing.admission=false"
FAILS = ('failure.0.at="4min"', 'workload.duration="9min"', 'workload.warmup="2min"')


def ran(file: str, policy: PolicyName, *settings: str) -> ScenarioRun:
    scenario = load_scenario(EXAMPLES / f"{file}.toml", ["workload.rate=2.8125", *settings])
    return run(scenario.with_policy(policy).with_seed(1))


def throughput(found: ScenarioRun) -> float:
    """Requests a second, until the last one has ended."""
    requests = found.simulation.requests
    return len(requests) * NS_PER_S / max(request.finished_at_ns for request in requests)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("policy", [PolicyName.ADAPTIVE, PolicyName.PAPER])
def test_a_timeout_costs_no_throughput_in_overload(policy: PolicyName) -> None:
    """Queues of minutes, and a time limit of one: 0.07 req/s, if who decodes computes them all."""
    overload = "workload.rate=3.8", 'workload.duration="8min"', 'workload.warmup="1min"', DECLINED
    patient = ran("paper-poisson", policy, *overload, 'routing.prefill_timeout="1h"')
    limited = ran("paper-poisson", policy, *overload, 'routing.prefill_timeout="20s"')
    assert throughput(limited) > 0.95 * throughput(patient)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("file", ["link-cut", "instance-down"])
def test_adaptive_is_no_worse_than_the_static_rule_when_parts_fail(file: str) -> None:
    ours, paper = (
        ran(file, policy, *FAILS).results for policy in (PolicyName.ADAPTIVE, PolicyName.PAPER)
    )
    assert ours.goodput > 0.98 * paper.goodput


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", [PolicyName.ADAPTIVE, PolicyName.PAPER])
def test_a_link_that_was_cut_is_used_again(policy: PolicyName) -> None:
    found = ran("link-cut", policy, *FAILS)
    back_ns = 5.5 * 60 * NS_PER_S
    later = [r for r in found.simulation.requests if r.arrived_at_ns > back_ns]
    assert sum(request.offloaded for request in later) > 0.3 * len(later)


@pytest.mark.timeout(120)
def test_prompts_of_an_instance_that_dies_are_prefilled_by_others() -> None:
    found = ran("instance-down", PolicyName.ADAPTIVE, *FAILS).results
    assert found.fallbacks["prefill/unreachable"] >= 1
    assert found.num_recomputed == 0


def test_the_time_limit_of_a_scenario_is_that_of_the_gateway() -> None:
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml")
    assert scenario.setup.routing.prefill_timeout_ns == PREFILL_TIMEOUT_NS
