"""A plan whose bytes are wrong: predictions correct themselves, in both directions."""

from __future__ import annotations

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES

SHORT = ('workload.duration="6min"', 'workload.warmup="1min"')
ABUNDANT = ("paper-poisson", "workload.rate=2.8125")
SCARCE = ("scarce-link", "workload.rate=1.75", 'plan_settings=["prfaas.0.link.bandwidth=5Gbps"]')


def ran(
    file: str, *settings: str, policy: PolicyName, ratio: float, layouts: bool = True
) -> ScenarioRun:
    plan = f"link.planned_bytes_ratio={ratio}", f"signals.layouts={str(layouts).lower()}"
    scenario = load_scenario(EXAMPLES / f"{file}.toml", [*SHORT, *plan, *settings])
    return run(scenario.with_policy(policy).with_seed(1))


def num_offloaded(found: ScenarioRun) -> int:
    return sum(request.offloaded for request in found.simulation.requests)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("policy", [PolicyName.ADAPTIVE, PolicyName.PAPER])
@pytest.mark.parametrize("ratio", [100.0, 0.01])
def test_transfers_alone_correct_the_plan(policy: PolicyName, ratio: float) -> None:
    """At the start predictions are wrong; after some transfers it is the run of a right plan."""
    right = ran(*ABUNDANT, policy=policy, ratio=1.0)
    wrong = ran(*ABUNDANT, policy=policy, ratio=ratio, layouts=False)
    assert wrong.simulation.front.dispatcher.carried.factor == pytest.approx(1 / ratio, rel=0.01)
    assert wrong.results.goodput > 0.98 * right.results.goodput
    assert num_offloaded(wrong) > 0.9 * num_offloaded(right)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ratio", [100.0, 0.01])
def test_layouts_correct_a_plan_by_which_nothing_would_be_offloaded(ratio: float) -> None:
    """Over 5 Gbit/s a prompt of a hundred times the bytes is never shipped, so none would show."""
    right = ran(*SCARCE, policy=PolicyName.ADAPTIVE, ratio=1.0)
    wrong = ran(*SCARCE, policy=PolicyName.ADAPTIVE, ratio=ratio)
    assert wrong.results.goodput > 0.98 * right.results.goodput
    assert num_offloaded(wrong) > 0.9 * num_offloaded(right)


def test_a_right_plan_is_not_corrected() -> None:
    found = ran(*ABUNDANT, policy=PolicyName.ADAPTIVE, ratio=1.0)
    carried = found.simulation.front.dispatcher.carried
    assert (carried.factor, carried.num_samples) == (1.0, 0)
