"""Clusters that a plan is better without are a line of its answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.problem import PrfaasCluster
from prfaas.planner.report.json_report import as_dict
from prfaas.planner.sizing.fleet import size


def with_more(question: Question, *others: PrfaasCluster, first: bool = False) -> Question:
    problem = question.problem
    clusters = (*others, *problem.prfaas) if first else (*problem.prfaas, *others)
    return replace(question, problem=replace(problem, prfaas=clusters, step_tokens=1000))


def other(question: Question, name: str, **changes: object) -> PrfaasCluster:
    """The cluster of the case study under another name, with changes of it or of its link."""
    [cluster] = question.problem.prfaas
    link = {key: changes.pop(key) for key in ("bits_per_s", "rtt_s") if key in changes}
    changed = replace(cluster, name=name, link=replace(cluster.link, **link))  # type: ignore[arg-type]
    return replace(changed, **changes)  # type: ignore[arg-type]


WORTHLESS: dict[str, dict[str, object]] = {
    "slow": {"bits_per_s": 1e9},
    "far": {"rtt_s": 3.0},
    "dear": {"price_per_gpu_h": 20.0},
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", WORTHLESS)
def test_a_worthless_cluster_does_not_decide(
    case_study: Question, name: str, *, first: bool
) -> None:
    alone = make_plan(with_more(case_study))
    asked = with_more(case_study, other(case_study, name, **WORTHLESS[name]), first=first)
    plan = make_plan(asked)
    assert plan.exact.gain < 0 < alone.exact.gain
    assert plan.left_out is not None
    assert plan.left_out.names == (name,)
    assert plan.left_out.gain == pytest.approx(alone.exact.gain)
    assert plan.verdict.answer is VerdictAnswer.DEPENDS
    assert f"without {name} it is {alone.exact.gain:+.1%}" in plan.verdict.sentence
    assert as_dict(plan)["left_out"]["names"] == [name] or as_dict(plan)["left_out"]["names"] == (
        name,
    )


def test_two_of_three_are_left_out(case_study: Question) -> None:
    asked = with_more(
        case_study,
        other(case_study, "slow", bits_per_s=1e9),
        other(case_study, "dear", price_per_gpu_h=20.0),
    )
    left_out = make_plan(asked).left_out
    assert left_out is not None
    assert set(left_out.names) == {"slow", "dear"}


def test_clusters_that_are_worth_it_stay(case_study: Question) -> None:
    [cluster] = case_study.problem.prfaas
    half = replace(cluster, num_instances=2)
    problem = replace(case_study.problem, prfaas=(half, replace(half, name="b")))
    plan = make_plan(replace(case_study, problem=problem))
    assert plan.left_out is None
    assert plan.verdict.answer is VerdictAnswer.PAYS
    assert "without" not in plan.verdict.sentence
    assert make_plan(case_study).left_out is None


def test_the_rest_has_to_carry_the_demand(case_study: Question) -> None:
    asked = with_more(case_study, other(case_study, "slow", bits_per_s=1e9))
    rates = make_plan(asked), make_plan(case_study)
    both, alone = (plan.exact.prfaas.operation.rate_per_s for plan in rates)
    assert alone < both
    plan = make_plan(replace(asked, arrival_per_s=(alone + both) / 2))
    assert plan.left_out is None
    assert plan.verdict.answer is VerdictAnswer.DOES_NOT_PAY


def test_a_target_that_only_the_far_cluster_misses_is_met_without_it(case_study: Question) -> None:
    asked = with_more(case_study, other(case_study, "slow", bits_per_s=0.2e9))
    problem = replace(asked.problem, ttft_p90_s=12.0)
    plan = make_plan(replace(asked, problem=problem, arrival_per_s=1.0))
    assert plan.left_out is not None
    assert plan.verdict.answer is VerdictAnswer.DEPENDS


def test_the_cheapest_fleet_leaves_it_out_as_well(case_study: Question) -> None:
    asked = with_more(case_study, other(case_study, "dear", price_per_gpu_h=20.0))
    alone = size(replace(case_study.problem, step_tokens=1000), 3.0).cheapest
    found = size(asked.problem, 3.0).cheapest
    assert found is not None
    assert alone is not None
    assert found.prfaas == (*alone.prfaas, 0)
    assert found.price_per_h == pytest.approx(alone.price_per_h)
