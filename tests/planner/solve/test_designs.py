from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.planner.answer.plan import compare, make_plan
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.answer.verdict import VerdictAnswer, judge
from prfaas.planner.hardware.profiles import DecodeProfile
from prfaas.planner.model.kv_geometry import kv_bytes_at
from prfaas.planner.problem import Problem
from prfaas.planner.solve import sensitivity
from prfaas.planner.solve.search import Bottleneck, optimum
from prfaas.planner.solve.sensitivity import GainSwing
from prfaas.planner.solve.throughput import StageMode


@pytest.fixture(scope="module")
def problem(case_study: Question) -> Problem:
    return case_study.problem


def test_two_half_clusters_are_one_cluster(problem: Problem) -> None:
    whole = problem.prfaas[0]
    half = replace(
        whole, num_instances=2, link=replace(whole.link, bits_per_s=whole.link.bits_per_s / 2)
    )
    two = replace(problem, prfaas=(half, replace(half, name="other")))
    for mode in StageMode:
        one, both = optimum(problem, mode), optimum(two, mode)
        assert both.rate_per_s == pytest.approx(one.rate_per_s)
        assert both.offload_threshold == one.offload_threshold


def test_a_second_cluster_on_a_thin_link_adds_what_the_link_carries(problem: Problem) -> None:
    thin = replace(
        problem.prfaas[0], name="thin", link=replace(problem.prfaas[0].link, bits_per_s=1e9)
    )
    more = optimum(replace(problem, prfaas=(*problem.prfaas, thin)), StageMode.EXACT)
    base = optimum(problem, StageMode.EXACT)
    assert base.rate_per_s < more.rate_per_s < base.rate_per_s * 1.1


def test_the_link_binds_when_it_is_thin(problem: Problem) -> None:
    found = optimum(sensitivity.with_bandwidth(problem, 0.05), StageMode.EXACT)
    assert found.capacity_per_s[Bottleneck.PRFAAS_NETWORK] == pytest.approx(
        found.rate_per_s, rel=0.01
    )


def test_transfers_on_their_way_hold_no_decode_memory(problem: Problem) -> None:
    tight = replace(problem.pd, kv_capacity_bytes=12 * 0.67e9)
    slow, fast = (
        optimum(sensitivity.with_bandwidth(replace(problem, pd=tight), factor), StageMode.EXACT)
        for factor in (0.2, 100)
    )
    assert slow.offload_fraction > 0
    assert slow.decode_per_s / slow.num_decode == fast.decode_per_s / fast.num_decode


def test_kv_memory_bounds_the_batch_and_with_it_the_step_time(problem: Problem) -> None:
    steps = tuple((0.010 + batch * 1e-4,) for batch in (1, 64, 512))
    decode = DecodeProfile("decode", "test", (1, 64, 512), (1.0,), steps)
    context = problem.workload.mean_context
    sequence = float(kv_bytes_at(problem.geometry, np.array([context]))[0])
    tight = replace(problem.pd, decode=decode, tpot_max_s=None, kv_capacity_bytes=64.5 * sequence)
    found = optimum(replace(problem, pd=tight), StageMode.EXACT)
    # 64 fit. The step of all 512, 61.2 ms, was charged for them: a quarter of what they carry.
    per_instance = 64 / (0.0164 * problem.workload.output_tokens)
    assert found.decode_per_s == pytest.approx(found.num_decode * per_instance)


def test_break_even_points_are_where_the_gain_is_zero(problem: Problem) -> None:
    bandwidth = sensitivity.break_even_bandwidth(problem, StageMode.EXACT)
    assert bandwidth is not None
    factor = bandwidth / problem.prfaas[0].link.bits_per_s
    assert (
        sensitivity.gain(sensitivity.with_bandwidth(problem, factor * 1.001), StageMode.EXACT) > 0
    )
    assert sensitivity.gain(sensitivity.with_bandwidth(problem, factor * 0.99), StageMode.EXACT) < 0


def test_recompute_bandwidth_is_the_kv_throughput_of_the_local_hardware(problem: Problem) -> None:
    seconds = problem.pd.prefill.seconds_at(20_000)
    size = 182_373_581 + 17_280 * 20_000
    assert sensitivity.recompute_bandwidth(problem, 20_000) == pytest.approx(size * 8 / seconds)


def test_without_a_prfaas_cluster_the_design_is_homogeneous(problem: Problem) -> None:
    alone = replace(problem, prfaas=())
    found = compare(alone, StageMode.EXACT)
    assert found.naive is None
    assert found.prfaas.operation.rate_per_s == pytest.approx(found.equal_gpus.operation.rate_per_s)


def test_a_plan_without_prfaas_clusters_can_be_made(case_study: Question) -> None:
    alone = replace(case_study, problem=replace(case_study.problem, prfaas=()))
    plan = make_plan(alone)
    assert plan.verdict.answer is not VerdictAnswer.PAYS
    assert plan.break_even_price.per_tb is None


@pytest.mark.parametrize(
    ("paper", "exact", "swing", "answer"),
    [
        (0.1, 0.1, GainSwing("x", 0.05, 0.2), VerdictAnswer.PAYS),
        (-0.1, -0.1, GainSwing("x", -0.2, 0.0), VerdictAnswer.DOES_NOT_PAY),
        (0.1, 0.1, GainSwing("x", -0.05, 0.2), VerdictAnswer.DEPENDS),
        (-0.01, 0.1, GainSwing("x", 0.05, 0.2), VerdictAnswer.DEPENDS),
        (-0.1, -0.1, GainSwing("x", -0.2, 0.1), VerdictAnswer.DEPENDS),
    ],
)
def test_verdicts(paper: float, exact: float, swing: GainSwing, answer: VerdictAnswer) -> None:
    verdict = judge(paper, exact, [swing], "something binds")
    assert verdict.answer is answer
    assert f"{exact:+.1%}" in verdict.sentence
    assert verdict.sentence.endswith("something binds.")
