"""The live case study and its simulation serve the same requests by the same rules."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.case_study.__main__ import PHASES, SCALE, SEED, WARM_S
from benchmarks.case_study.designs import case_study, requests
from benchmarks.case_study.simulated import simulate

PAGE = Path(__file__).parents[2] / "docs" / "results" / "case-study.md"


def test_the_simulated_rates_are_those_of_the_page() -> None:
    """At 1.25 times the planned rate: a simulator that refuses requests would show others."""
    question, designs = case_study()
    end_s = sum(phase.seconds for phase in PHASES)
    counted_s = PHASES[-1].seconds - WARM_S
    for design in designs:
        asked = requests(question.problem, design, PHASES, SEED)
        outcomes = simulate(question, design, asked, end_s, SCALE.rtt_ms / 1e3)
        first = [o.first for o in outcomes if o.first is not None]
        rate = sum(end_s - counted_s <= at_s < end_s for at_s in first) / counted_s
        assert f"{rate:.2f}" == shown(design.name)


def shown(design: str) -> str:
    """Simulated rate of a design on the page."""
    [row] = re.findall(rf"^\| {design}, req/s \|.*$", PAGE.read_text(), re.MULTILINE)
    return str(row.split("|")[5].strip())
