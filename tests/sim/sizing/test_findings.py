"""Figures of simulated fleets become findings, and chance does not become one."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.problem import Problem
from prfaas.sim.sizing import Figures, Finding, in_words, report
from tests.planner.paths import EXAMPLES

GOOD = Figures(
    num_arrived=1000,
    arrived_per_s=10.0,
    carried_per_s=10.0,
    local_per_s=5.0,
    remote_per_s=5.0,
    offloaded_ratio=0.5,
    ttft_p90_s=9.0,
    ttft_p99_s=15.0,
    tpot_s=0.024,
    num_unserved=0,
)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return load_question(EXAMPLES / "paper-case-study.toml", ['slo.ttft_p90="12s"']).problem


def of(problem: Problem, name: str, values: list[float]) -> tuple[Finding, str]:
    """The finding with a figure as it was in each of some seeds."""
    found = report(problem, [Figures(**{**asdict(GOOD), name: value}) for value in values])
    return found.finding, found.binding


def test_a_fleet_that_meets_every_target_in_every_seed_holds(problem: Problem) -> None:
    assert of(problem, "ttft_p90_s", [9.0, 9.5, 10.0]) == (Finding.HOLDS, "")


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("ttft_p90_s", [14.0, 14.5, 15.0], "TTFT P90 is 14.5 ± 1.2 s against a target of 12 s"),
        ("tpot_s", [0.027, 0.027], "TPOT is 27 ms against a target of 25 ms"),
        ("carried_per_s", [9.0, 9.1], "of the arrivals are carried, so queues grow"),
        ("num_unserved", [10, 20], "1.5% of the requests fail"),
    ],
)
def test_what_misses_a_target_in_all_seeds_is_said_with_its_figure(
    problem: Problem, name: str, values: list[float], words: str
) -> None:
    finding, binding = of(problem, name, values)
    assert finding is Finding.DOES_NOT_HOLD
    assert words in binding


def test_a_target_inside_the_interval_is_not_decided(problem: Problem) -> None:
    finding, binding = of(problem, "ttft_p90_s", [11.0, 12.0, 12.5])
    assert finding is Finding.NOT_DECIDED
    assert "11.8 ± 1.9 s against a target of 12 s" in binding


def test_no_target_is_no_reason_not_to_hold(problem: Problem) -> None:
    free = replace(problem, ttft_p90_s=None)
    assert of(free, "ttft_p90_s", [100.0, 900.0]) == (Finding.HOLDS, "")


def test_an_interval_that_reaches_zero_is_not_shown(problem: Problem) -> None:
    found = report(problem, [replace(GOOD, ttft_p90_s=value) for value in (15.55, 24.05)])
    assert in_words(found.ttft_p90_s, 1, "s") == "about 20 s"  # 19.8 ± 54 s
    found = report(problem, [replace(GOOD, ttft_p90_s=value) for value in (15.5, 20.0, 24.0)])
    assert in_words(found.ttft_p90_s, 1, "s") == "19.8 ± 11 s"


def test_figures_have_no_exponents() -> None:
    found = report(
        load_question(EXAMPLES / "paper-case-study.toml").problem,
        [replace(GOOD, ttft_p90_s=value) for value in (1000.0, 3000.0)],
    )
    assert in_words(found.ttft_p90_s, 1, "s") == "about 2,000 s"
    assert in_words(found.tpot_s, 1e3, "ms") == "24 ms"
