"""Beyond capacity: nothing collapses, nobody starves, and adaptive is no worse than any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.setup import DecodeLimits, SloSetup
from tests.sim.systems import EXAMPLES

FIVE_GBIT = 'plan_settings=["prfaas.0.link.bandwidth=5Gbps"]'
SYSTEMS: dict[str, tuple[str, Sequence[str], float]] = {
    "abundant, fresh": ("paper-poisson", (), 3.17),
    "abundant, stale": ("paper-poisson", (FIVE_GBIT, 'link.bandwidth="100Gbps"'), 3.17),
    "scarce, fresh": ("scarce-link", (FIVE_GBIT,), 2.0),
    "scarce, stale": ("scarce-link", (), 2.0),
}
"""File, changes, and what the system carries with the right plan, req/s."""


def results(name: str, load: float, policy: PolicyName, *more: str) -> Results:
    """Fifteen minutes of a system, the first three of them not counted."""
    file, changes, capacity = SYSTEMS[name]
    settings = [
        *changes,
        f"workload.rate={capacity * load}",
        'workload.duration="15min"',
        'workload.warmup="3min"',
        *more,
    ]
    scenario = load_scenario(EXAMPLES / f"{file}.toml", settings).with_policy(policy)
    return run(scenario.with_seed(1)).results


@pytest.mark.timeout(240)
@pytest.mark.parametrize("load", [0.8, 1.2])
@pytest.mark.parametrize("name", SYSTEMS)
def test_adaptive_is_no_worse_than_any_policy_on_either_side_of_capacity(
    name: str, load: float
) -> None:
    found = {policy: results(name, load, policy) for policy in PolicyName}
    ours, best = found[PolicyName.ADAPTIVE], max(r.goodput for r in found.values())
    # Over an hour and three seeds it is within 2 %: docs/results/policies.md.
    assert ours.goodput > 0.97 * best
    paper = found[PolicyName.PAPER].time_to_first_token["avg"]
    assert ours.time_to_first_token["avg"] < 1.5 * paper


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_admitted_under_overload_is_served_in_time(name: str) -> None:
    found = results(name, 1.4, PolicyName.ADAPTIVE)
    assert found.good_request_count > 0.9 * found.outcomes["finished"]
    assert found.time_to_first_token["max"] < 30_000


@pytest.mark.timeout(120)
def test_without_admission_nobody_waits_longer_than_under_the_static_rule() -> None:
    apart = "routing.admission=false"
    ours = results("abundant, fresh", 1.2, PolicyName.ADAPTIVE, apart)
    paper = results("abundant, fresh", 1.2, PolicyName.PAPER, apart)
    assert ours.time_to_first_token["max"] < 1.3 * paper.time_to_first_token["max"]
    assert ours.time_to_first_token["avg"] < 1.3 * paper.time_to_first_token["avg"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["scarce, fresh", "scarce, stale"])
def test_without_admission_a_link_that_is_in_time_is_filled_for_those_who_are_lost(
    name: str,
) -> None:
    found = {
        policy: results(name, 1.4, policy, "routing.admission=false")
        for policy in (PolicyName.REMOTE, PolicyName.ADAPTIVE)
    }
    ours, remote = found[PolicyName.ADAPTIVE], found[PolicyName.REMOTE]
    assert ours.goodput > 0.9 * remote.goodput
    assert ours.time_to_first_token["avg"] < 1.05 * remote.time_to_first_token["avg"]


@pytest.mark.timeout(120)
def test_a_target_brings_admission_unless_it_is_declined() -> None:
    assert results("scarce, stale", 1.2, PolicyName.PAPER).outcomes.get("rejected", 0) > 0
    declined = results("scarce, stale", 1.2, PolicyName.PAPER, "routing.admission=false")
    assert "rejected" not in declined.outcomes


@pytest.mark.timeout(120)
def test_transfers_that_wait_for_the_link_take_no_room_from_decode() -> None:
    file, changes, _ = SYSTEMS["scarce, stale"]
    settings = [*changes, "workload.rate=2.4", 'workload.duration="20min"', "routing.policy=paper"]
    scenario = load_scenario(EXAMPLES / f"{file}.toml", settings)
    routing = replace(scenario.setup.routing, admission=False)
    throughput = []
    # Room for twelve of the twenty requests of a batch, and room without end; no targets.
    for room in (scenario.setup.costs.kv_bytes(30_000) * 12, None):
        decode = DecodeLimits(20, room)
        setup = replace(scenario.setup, decode=decode, routing=routing, slo=SloSetup())
        throughput.append(run(replace(scenario, setup=setup)).results.request_throughput)
    assert throughput[0] > 0.95 * throughput[1] > 1.4


@pytest.mark.timeout(120)
def test_adaptive_finds_the_threshold_that_a_stale_plan_does_not_have() -> None:
    # Planned for 100 Gbit/s and other prompts: Mooncake's want about 3,000 tokens, not 19,600.
    settings = ["workload.rate_scale=3.0", "workload.requests=6000"]
    scenario = load_scenario(EXAMPLES / "mooncake.toml", settings)
    assert scenario.setup.routing.offload_threshold > 19_000
    done = {policy: run(scenario.with_policy(policy)) for policy in PolicyName}
    ours = done[PolicyName.ADAPTIVE]
    assert ours.simulation.front.offload_threshold < 8_000
    assert ours.results.goodput > max(r.results.goodput for r in done.values()) * 0.98
    assert ours.results.goodput > 1.3 * done[PolicyName.PAPER].results.goodput
