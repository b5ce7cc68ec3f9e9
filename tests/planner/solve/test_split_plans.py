"""Plans of splits, for the requests of the plan and for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.core.control.split import Plans
from prfaas.core.control.threshold_loop import TrafficMix
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.solve.designs import split_plans
from prfaas.planner.solve.search import optimum, search_grid
from prfaas.planner.solve.throughput import StageMode

PLAN = Path(__file__).parents[3] / "examples" / "plan" / "paper-case-study.toml"
PROBLEM = load_question(PLAN).problem
GBPS_100 = 1e11


@pytest.fixture
def plans() -> Plans:
    return split_plans(PROBLEM)


def best(plans: Plans, mix: TrafficMix | None) -> int:
    """The split that sustains most."""
    splits = range(1, PROBLEM.pd.num_instances)
    found = {n: plans(n, GBPS_100, mix) for n in splits}
    return max(splits, key=lambda n: found[n].rate_per_s if found[n] else 0.0)  # type: ignore[union-attr]


def test_without_a_mix_the_plan_s_own_requests_count(plans: Plans) -> None:
    found = optimum(PROBLEM, StageMode.EXACT)
    assert best(plans, None) == found.num_prefill
    plan = plans(found.num_prefill, GBPS_100, None)
    assert plan is not None
    assert plan.rate_per_s == pytest.approx(found.rate_per_s)
    assert plan.offload_threshold == found.offload_threshold


def test_the_best_split_follows_the_mix(plans: Plans) -> None:
    lengths = tuple(range(10_000, 60_000, 500))
    reads = TrafficMix(lengths, 35_000, 200)
    writes = TrafficMix(tuple(length // 20 for length in lengths), 1_750, 4000)
    assert best(plans, writes) < best(plans, None) < best(plans, reads)


@pytest.mark.parametrize(
    "mix",
    [TrafficMix((5,) * 100, 5, 1000), TrafficMix((1, 10**9) * 50, 10**9, 0)],
    ids=["one length", "odd"],
)
def test_requests_beyond_the_plan_are_planned_for_all_the_same(
    plans: Plans, mix: TrafficMix
) -> None:
    plan = plans(3, GBPS_100, mix)
    assert plan is None or plan.rate_per_s > 0


def test_a_link_of_nothing_and_no_prfaas_cluster_have_no_plan(plans: Plans) -> None:
    assert plans(3, 0.0, None) is None


def test_of_equal_thresholds_the_one_that_leaves_most_room_is_planned(plans: Plans) -> None:
    """With one instance that decodes, decode binds whatever is offloaded."""
    grid = search_grid(PROBLEM, StageMode.EXACT)
    row = PROBLEM.pd.num_instances - 1
    is_equal = grid.rate[row] >= grid.rate[row].max() * (1 - 1e-9)
    equal = grid.terms.threshold[is_equal]
    assert len(equal) > 1
    plan = plans(row, GBPS_100, None)
    assert plan is not None
    assert min(equal) < plan.offload_threshold < max(equal)
    column = int((grid.terms.threshold == plan.offload_threshold).argmax())
    share = grid.terms.offload_fraction[column]
    here, remote = grid.pd_prefill[row, column] / (1 - share), grid.prfaas[column] / share
    assert here == pytest.approx(remote, rel=0.02)
