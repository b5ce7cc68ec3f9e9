"""Fallbacks in a run: prompts that are late or lost go where there is room."""

from __future__ import annotations

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import Run, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES

FAILS = ('failure.0.at="4min"', 'workload.duration="9min"', 'workload.warmup="2min"')


def ran(file: str, policy: PolicyName, *settings: str) -> Run:
    scenario = load_scenario(EXAMPLES / f"{file}.toml", ["workload.rate=2.8125", *settings])
    return run(scenario.with_policy(policy).with_seed(1))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", [PolicyName.ADAPTIVE, PolicyName.PAPER])
def test_a_link_that_was_cut_is_used_again(policy: PolicyName) -> None:
    found = ran("link-cut", policy, *FAILS)
    back_ns = 5.5 * 60 * NS_PER_S
    later = [r for r in found.simulation.requests if r.arrived_at_ns > back_ns]
    assert sum(request.offloaded for request in later) > 0.3 * len(later)
