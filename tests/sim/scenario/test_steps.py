"""Events and Python instructions of a simulated request: counts, since times depend on the machine.

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


def measured(scenario: Scenario) -> tuple[int, int, int]:
    """Requests of a run, its instructions, and its events."""
    found, num_instructions = counted(lambda: run(scenario))
    return len(found.simulation.requests), num_instructions, found.results.num_events


def case_study(num_requests: int, times: int = 1) -> Scenario:
    """The paper's case study under the adaptive policy, with about so many requests.

    Args:
        times: Factor of instances, rate and link.
    """
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml").with_policy(PolicyName.ADAPTIVE)
    source, setup = scenario.workload.source, scenario.setup
    assert isinstance(source, Synthetic)
    rate = source.rate_per_s * times
    end_ns = round(num_requests / rate * NS_PER_S)
    workload = replace(
        scenario.workload, source=replace(source, rate_per_s=rate, duration_ns=end_ns)
    )
    (cluster,) = setup.prfaas
    link = replace(cluster.link, bits_per_s=cluster.link.bits_per_s * times)
    setup = replace(
        setup,
        prfaas=(replace(cluster, num_instances=cluster.num_instances * times, link=link),),
        num_prefill=setup.num_prefill * times,
        num_decode=setup.num_decode * times,
    )
    return replace(scenario, setup=setup, workload=workload, start_ns=0, end_ns=end_ns)


def large(num_requests: int) -> Scenario:
    """The same with 1,248 instances."""
    return case_study(num_requests, times=104)


def mooncake(num_requests: int) -> Scenario:
    """The first requests of Mooncake's conversation, with caches that are full soon."""
    scenario = load_scenario(EXAMPLES / "mooncake.toml")
    source, setup = scenario.workload.source, scenario.setup
    assert isinstance(source, Trace)
    source = replace(source, rows=source.rows[:num_requests])
    (cluster,) = setup.prfaas
    cache = replace(setup.cache, host_blocks=500)
    setup = replace(setup, cache=cache, prfaas=(replace(cluster, cache=cache),))
    return replace(scenario, setup=setup, workload=replace(scenario.workload, source=source))


@pytest.mark.parametrize(
    ("make", "few", "many", "most", "events"),
    [
        (case_study, 50, 250, 12_000, 7.3),
        (mooncake, 50, 250, 15_150, 7.3),
        (large, 500, 1000, 13_090, 7.0),
    ],
)
def test_a_request_takes_no_more_instructions_and_events_than_it_did(
    make: Any, few: int, many: int, most: int, events: float
) -> None:
    short, long = measured(make(few)), measured(make(many))
    num_requests, num_instructions, num_events = (
        after - before for before, after in zip(short, long, strict=True)
    )
    found = num_instructions / num_requests
    assert found <= most, f"{found:,.0f} instructions a request; find out what has been added"
    assert num_events / num_requests <= events
