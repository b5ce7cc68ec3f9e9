"""Python instructions of a simulated request: a count, since times depend on the machine.

`benchmarks/sim/bench_speed.py` measures times; they are in proportion to this count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.workloads.requests import Synthetic, Trace
from prfaas.units import NS_PER_S
from tests.instructions import counted
from tests.sim.systems import EXAMPLES

FEW, MANY = 50, 250


def measured(scenario: Scenario) -> tuple[int, int]:
    """Requests of a run, and its instructions."""
    found, num_instructions = counted(lambda: run(scenario))
    return len(found.simulation.requests), num_instructions


def case_study(num_requests: int) -> Scenario:
    """The paper's case study under the adaptive policy, with about so many requests."""
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml").with_policy(PolicyName.ADAPTIVE)
    source = scenario.workload.source
    assert isinstance(source, Synthetic)
    end_ns = round(num_requests / source.rate_per_s * NS_PER_S)
    workload = replace(scenario.workload, source=replace(source, duration_ns=end_ns))
    return replace(scenario, workload=workload, start_ns=0, end_ns=end_ns)


def mooncake(num_requests: int) -> Scenario:
    """The first requests of Mooncake's conversation."""
    scenario = load_scenario(EXAMPLES / "mooncake.toml")
    source = scenario.workload.source
    assert isinstance(source, Trace)
    source = replace(source, rows=source.rows[:num_requests])
    return replace(scenario, workload=replace(scenario.workload, source=source))


@pytest.mark.parametrize(("make", "most"), [(case_study, 12_685), (mooncake, 12_750)])
def test_a_request_takes_no_more_instructions_than_it_did(make: Any, most: int) -> None:
    few, many = measured(make(FEW)), measured(make(MANY))
    found = (many[1] - few[1]) / (many[0] - few[0])
    assert found <= most, f"{found:,.0f} instructions a request; find out what has been added"
