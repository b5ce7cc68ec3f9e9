"""Measured cells as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from benchmarks.agreement.measured import LOADS, Cell, planned, wander_of
from prfaas import units as w
from prfaas.planner.solve.search import Bottleneck

_SHORT = {
    Bottleneck.PRFAAS_COMPUTE: "PrfaaS prefill",
    Bottleneck.PRFAAS_NETWORK: "link",
    Bottleneck.PD_PREFILL: "PD-P",
    Bottleneck.PD_DECODE: "PD-D",
}


def table(cells: Sequence[Cell]) -> str:
    """Rows of all plans that were measured; cells of several seeds as their mean."""
    head = "| plan | model | link | instances | offloaded | Λ, req/s | binds | few long prompts |"
    lines = [
        head + "".join(f" {load} |" for load in LOADS),
        "|---" * (8 + len(LOADS)) + "|",
    ]
    for number in sorted({cell.number for cell in cells}):
        mine = [cell for cell in cells if cell.number == number]
        lines.append(_row(number, mine))
    return "\n".join(lines)


def _row(number: int, cells: Sequence[Cell]) -> str:
    question, found = planned(number)
    problem, wander = question.problem, wander_of(number)
    links = " + ".join(w.bandwidth(c.link.bits_per_s) for c in problem.prfaas)
    parts = [
        str(number),
        problem.title,
        links,
        f"{found.num_prfaas}/{found.num_prefill}/{found.num_decode}",
        w.percent(found.offload_fraction),
        f"{found.rate_per_s:.3g}",
        _SHORT[found.binding],
        f"±{wander:.0%}" if wander else "",
        *(_cell([c for c in cells if c.load == load]) for load in LOADS),
    ]
    return f"| {' | '.join(parts)} |"


def _cell(cells: Sequence[Cell]) -> str:
    if not cells:
        return "-"
    ratio = mean(cell.ratio for cell in cells)
    shown = f"{ratio - 1:+.1%}"
    return f"**{shown}**" if abs(ratio - 1) > 0.05 else shown
