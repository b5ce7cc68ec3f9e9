"""Laws that the throughput model obeys for every question."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.problem import Problem
from prfaas.planner.solve import throughput as tp
from prfaas.planner.solve.search import grid_for, optimum, search_grid, thresholds
from prfaas.planner.solve.sensitivity import scaled_geometry, with_bandwidth
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.workload import LengthDistribution
from tests.planner.strategies import affine_profiles, lengths, problems

ALMOST = 1 - 1e-9
modes = st.sampled_from(StageMode)


@settings(max_examples=60, deadline=None)
@given(problems(), modes, st.floats(1, 100))
def test_more_bandwidth_never_hurts(problem: Problem, mode: StageMode, factor: float) -> None:
    before = optimum(problem, mode).rate_per_s
    assert optimum(with_bandwidth(problem, factor), mode).rate_per_s >= before * ALMOST


@settings(max_examples=60, deadline=None)
@given(problems(), modes)
def test_more_instances_never_hurt(problem: Problem, mode: StageMode) -> None:
    before = optimum(problem, mode).rate_per_s
    remote = replace(problem.prfaas[0], num_instances=problem.prfaas[0].num_instances + 1)
    local = replace(problem.pd, num_instances=problem.pd.num_instances + 1)
    assert optimum(problem.with_cluster(0, remote), mode).rate_per_s >= before * ALMOST
    assert optimum(replace(problem, pd=local), mode).rate_per_s >= before * ALMOST


def _producers(problem: Problem, mode: StageMode) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    terms = tp.stage_terms(problem, thresholds(problem), mode)
    p = terms.offload_fraction
    inner = (p > 1e-6) & (p < 1 - 1e-6)
    remote = tp.prfaas_throughput(terms, tp.cluster_throughputs(problem, terms))
    local = tp.pd_prefill_throughput(terms, np.array([[1.0]]))[0]
    p = p[inner]
    return p, remote[inner] / p, local[inner] / (1 - p)


def _never_rises(values: np.ndarray) -> bool:
    return bool(np.all(values[1:] <= values[:-1] * (1 + 1e-6)))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_producers_move_apart_with_p_exactly(problem: Problem) -> None:
    # Thresholds rise along the arrays, so p falls along them.
    _, remote, local = _producers(problem, StageMode.EXACT)
    assert _never_rises(remote[::-1])
    assert _never_rises(local)


@settings(max_examples=60, deadline=None)
@given(problems(affine_profiles()))
def test_producers_move_apart_with_p_in_the_papers_mode(problem: Problem) -> None:
    # With representative lengths this holds while the tangent of T at l_long is not negative at t,
    # which every affine profile and the paper's own satisfy.
    _, remote, local = _producers(problem, StageMode.PAPER)
    assert _never_rises(remote[::-1])
    assert _never_rises(local)


@pytest.mark.parametrize("mode", StageMode)
def test_producers_move_apart_in_the_case_study(case_study: Question, mode: StageMode) -> None:
    _, remote, local = _producers(case_study.problem, mode)
    assert _never_rises(remote[::-1])
    assert _never_rises(local)


@settings(max_examples=60, deadline=None)
@given(problems(), modes)
def test_the_optimum_beats_its_grid_neighbours(problem: Problem, mode: StageMode) -> None:
    best = optimum(problem, mode)
    assert best.offload_threshold is not None
    tried = thresholds(problem)
    at = int(np.searchsorted(tried, best.offload_threshold))
    near = tried[max(at - 1, 0) : at + 2]
    grid = grid_for(problem, tp.stage_terms(problem, near, mode))
    splits = [s for s in (-1, 0, 1) if 0 <= best.num_prefill + s < problem.pd.num_instances]
    neighbours = grid.rate[[best.num_prefill + s for s in splits]]
    assert neighbours.max() <= best.rate_per_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), modes)
def test_the_optimum_is_the_grid_maximum(problem: Problem, mode: StageMode) -> None:
    grid = search_grid(problem, mode)
    best = optimum(problem, mode, grid)
    assert best.rate_per_s >= grid.rate.max() * ALMOST
    assert best.num_decode >= 1
    assert best.rate_per_s <= min(best.capacity_per_s.values()) * (1 + 1e-9)
    assert best.slack(best.binding) == pytest.approx(0, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), modes, st.sampled_from([2.0, 8.0]))
def test_units_scale(problem: Problem, mode: StageMode, factor: float) -> None:
    before = optimum(problem, mode)
    # Time in other units: everything that takes time takes `factor` as much.
    slow = replace(
        with_bandwidth(problem, 1 / factor),
        pd=replace(
            problem.pd,
            prefill=problem.pd.prefill.scaled(factor),
            decode=problem.pd.decode.scaled(factor),
        ),
    )
    for i, cluster in enumerate(slow.prfaas):
        slow = slow.with_cluster(i, replace(cluster, prefill=cluster.prefill.scaled(factor)))
    assert optimum(slow, mode).rate_per_s == pytest.approx(before.rate_per_s / factor, rel=1e-6)
    # Size in other units: caches, links and memory alike.
    memory = problem.pd.kv_capacity_bytes
    large = replace(
        with_bandwidth(problem, factor),
        geometry=scaled_geometry(problem.geometry, factor),
        pd=replace(problem.pd, kv_capacity_bytes=memory * factor if memory else None),
    )
    assert optimum(large, mode).rate_per_s == pytest.approx(before.rate_per_s, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(lengths(), st.floats(0.05, 0.95))
def test_a_distribution_is_consistent_with_itself(work: LengthDistribution, ratio: float) -> None:
    middle = work.quantiles(np.array([ratio]))
    ends = np.array([work.low, work.high])
    assert work.prob_above(ends)[1] == pytest.approx(0, abs=1e-12)
    ones = work.expectation_up_to(np.ones_like, middle)
    assert ones[0] == pytest.approx(1 - work.prob_above(middle)[0], abs=1e-6)
    by_quadrature = work.expectation_up_to(lambda x: x, middle)
    assert by_quadrature[0] == pytest.approx(work.mean_up_to(middle)[0], rel=1e-6)
    tokens, weights = work.sample()
    assert weights.sum() == pytest.approx(1)
    assert float(tokens @ weights) == pytest.approx(work.mean_up_to(ends)[1], rel=2e-2)
