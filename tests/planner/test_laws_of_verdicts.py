"""Laws of the verdict and of all figures, over random plans."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from prfaas.planner.answer.plan import Plan, compare, make_plan, verdict_of
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.problem import Problem
from prfaas.planner.report.json_report import as_dict
from prfaas.planner.report.terminal import print_plan
from prfaas.planner.sizing.fleet import Fleet, size
from prfaas.planner.sizing.obstacles import obstacle
from prfaas.planner.solve import sensitivity
from prfaas.planner.solve.latency import best_operation
from prfaas.planner.solve.search import optimum
from prfaas.planner.solve.throughput import StageMode
from prfaas.presentation import recorded_page

from .strategies import problems

ORDER = {VerdictAnswer.DOES_NOT_PAY: 0, VerdictAnswer.DEPENDS: 1, VerdictAnswer.PAYS: 2}
targets = st.none() | st.floats(0.5, 60)
pytestmark = pytest.mark.timeout(300)
Change = Callable[[Problem, float, float], tuple[Problem, float]]


def _rtt(problem: Problem, demand: float, factor: float) -> tuple[Problem, float]:
    clusters = tuple(
        replace(c, link=replace(c.link, rtt_s=0.05 * factor**4)) for c in problem.prfaas
    )
    return replace(problem, prfaas=clusters), demand


def _gpu_price(problem: Problem, demand: float, factor: float) -> tuple[Problem, float]:
    clusters = tuple(replace(c, price_per_gpu_h=c.price_per_gpu_h * factor) for c in problem.prfaas)
    return replace(problem, prfaas=clusters), demand


def _traffic_price(problem: Problem, demand: float, factor: float) -> tuple[Problem, float]:
    clusters = tuple(
        replace(c, link=replace(c.link, price_per_tb=(c.link.price_per_tb + 0.1) * factor**2))
        for c in problem.prfaas
    )
    return replace(problem, prfaas=clusters), demand


def _demand(problem: Problem, demand: float, factor: float) -> tuple[Problem, float]:
    return problem, demand * factor


def answer(problem: Problem, demand_per_s: float) -> VerdictAnswer:
    paper, exact = compare(problem, StageMode.PAPER), compare(problem, StageMode.EXACT)
    question = Question(problem, demand_per_s, problem.chunk_tokens)
    swings = sensitivity.tornado(problem, StageMode.EXACT)
    return verdict_of(question, paper, exact, swings, None).answer


@pytest.mark.parametrize("change", [_rtt, _gpu_price, _traffic_price, _demand])
@settings(max_examples=4, deadline=None)
@given(problem=problems(), load=st.floats(0.2, 1.5), target_s=targets)
def test_the_verdict_never_improves_with(
    change: Change, problem: Problem, load: float, target_s: float | None
) -> None:
    asked = replace(problem, ttft_p90_s=target_s)
    demand = load * optimum(problem, StageMode.EXACT).rate_per_s
    answers = [ORDER[answer(*change(asked, demand, factor))] for factor in (1.0, 1.6, 4.0)]
    assert answers == sorted(answers, reverse=True)


@settings(max_examples=30, deadline=None)
@given(problem=problems(), target_s=st.floats(0.5, 60), stricter=st.floats(0.3, 1))
def test_a_stricter_target_never_carries_more(
    problem: Problem, target_s: float, stricter: float
) -> None:
    loose, strict = (
        best_operation(replace(problem, ttft_p90_s=t), StageMode.EXACT).rate_per_s
        for t in (target_s, target_s * stricter)
    )
    assert strict <= loose * (1 + 1e-6)
    assert loose <= optimum(problem, StageMode.EXACT).rate_per_s * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(
    problem=problems(),
    load=st.floats(0.2, 1.2),
    target_s=st.floats(0.5, 60),
    stricter=st.floats(0.3, 1),
)
def test_what_a_target_forbids_a_stricter_one_forbids_too(
    problem: Problem, load: float, target_s: float, stricter: float
) -> None:
    # The gain itself may rise: a stricter target may be one that only PrfaaS-PD meets.
    demand = load * optimum(problem, StageMode.EXACT).rate_per_s
    forbidden = []
    for seconds in (target_s, target_s * stricter):
        asked = replace(problem, ttft_p90_s=seconds)
        ours = compare(asked, StageMode.EXACT).prfaas
        forbidden.append(bool(obstacle(asked, ours, demand, None)))
    assert forbidden == sorted(forbidden)


def _price(fleet: Fleet | None) -> float:
    return math.inf if fleet is None else fleet.price_per_h


@settings(max_examples=3, deadline=None)
@given(problem=problems(), load=st.floats(0.2, 1.5), target_s=targets, more=st.floats(1.2, 3))
def test_a_larger_demand_never_costs_less(
    problem: Problem, load: float, target_s: float | None, more: float
) -> None:
    asked = replace(problem, ttft_p90_s=target_s)
    demand = load * optimum(problem, StageMode.EXACT).rate_per_s
    less, larger = (size(asked, demand * factor) for factor in (1.0, more))
    assert _price(less.homogeneous) <= _price(larger.homogeneous) * (1 + 1e-9)
    assert _price(less.cheapest) <= _price(larger.cheapest) * (1 + 1e-9)
    for sizing in (less, larger):
        assert _price(sizing.cheapest) <= _price(sizing.homogeneous)


def _numbers(value: object, path: str = "") -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [x for key, item in value.items() for x in _numbers(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [x for item in value for x in _numbers(item, path)]
    return [(path, value)] if isinstance(value, int | float) else []


SIGNED = ("gain_at_equal_cost", ".left_out.gain", "rate_gain_per_s", ".tornado", ".verdict.between")
SHARES = ("_fraction", "_ratio", ".slack.", "cluster_shares")


@settings(max_examples=4, deadline=None)
@given(problem=problems(), load=st.floats(0.2, 1.5), target_s=targets)
def test_no_number_of_a_plan_is_nan_infinite_or_negative(
    problem: Problem, load: float, target_s: float | None
) -> None:
    question = replace(problem, ttft_p90_s=target_s)
    demand = load * optimum(problem, StageMode.EXACT).rate_per_s
    made = make_plan(Question(question, demand, 8192))
    check_numbers(made)


def check_numbers(made: Plan) -> None:
    """No figure of any output is NaN, or negative where it cannot be; inf names its stage."""
    for path, number in _numbers(as_dict(made)):
        assert math.isfinite(number), path
        if not any(word in path for word in SIGNED):
            assert number >= -1e-9, path
        if any(word in path for word in SHARES):
            assert number <= 1 + 1e-9, path
    console = Console(file=io.StringIO(), width=200, color_system=None)
    print_plan(made, console)
    assert isinstance(console.file, io.StringIO)
    page = re.sub("<[^>]*>", "", recorded_page(partial(print_plan, made, is_page=True)))
    for text in (console.file.getvalue(), page):
        assert not re.search(r"\bnan\b", text, re.IGNORECASE)
        if re.search(r"\binf\b", text):
            assert made.latencies.overloaded
        for name, stage in made.latencies.overloaded.items():
            assert f"inf: {stage.value} of {name} is overloaded" in " ".join(text.split())
    assert set(made.latencies.overloaded) == {
        name for name, latency in made.latencies.queued.items() if math.isinf(latency.mean)
    }
