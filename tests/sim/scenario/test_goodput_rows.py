"""The rows that are run live: what the simulator says of them, and the gateway's plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.goodput.__main__ import SCALE, goodput_of
from benchmarks.goodput.rows import ROWS, Span, scenario_of, simulated
from benchmarks.scaled_plan import scaled_plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.sim.scenario.run import run

SPAN = Span(20, 90, 135)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ROWS)
def test_goodput_is_counted_as_the_simulator_counts_it(name: str) -> None:
    scenario = scenario_of(ROWS[name], SPAN, "adaptive", seed=1)
    results = run(scenario).results
    outcomes = simulated(scenario_of(ROWS[name], SPAN, "adaptive", seed=1))
    assert results.goodput == pytest.approx(goodput_of(outcomes, SPAN, scenario))
    assert len(outcomes) == len(scenario.requests())


@pytest.mark.parametrize("bits_per_s", [None, 5e9])
def test_the_gateways_plan_has_the_bytes_of_the_engines_blocks(
    bits_per_s: float | None, tmp_path: Path
) -> None:
    problem = load_question(scaled_plan(bits_per_s, SCALE.bytes, tmp_path)).problem
    assert problem.prfaas[0].link.bits_per_s == (bits_per_s or 100e9) * SCALE.bytes
    assert problem.geometry.token_bytes == 17_280 * SCALE.bytes
    assert problem.geometry.state_bytes == pytest.approx(173.925 * 2**20 * SCALE.bytes, abs=1)
