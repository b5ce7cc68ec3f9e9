"""The planner's best threshold for every split of the PD instances, for the long-term loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import log

from prfaas.core.role_loop import SplitPlan
from prfaas.planner.problem import Problem
from prfaas.planner.search import search_grid
from prfaas.planner.throughput import Mode

Plans = Callable[[int, float], SplitPlan | None]
"""The planner's answer for a number of prefill instances and links of so many bits per second."""

_STEP = 1.1
"""Links whose capacities differ by less than this factor share a plan."""


def split_plans(problem: Problem) -> Plans:
    """Plans of a deployment's splits, for links of any total capacity; each is made once."""
    planned = sum(c.link.bits_per_s for c in problem.prfaas)

    @cache
    def of_link(step: int) -> dict[int, SplitPlan]:
        prfaas = tuple(
            replace(c, link=replace(c.link, bits_per_s=c.link.bits_per_s * _STEP**step))
            for c in problem.prfaas
        )
        grid = search_grid(replace(problem, prfaas=prfaas), Mode.EXACT)
        best = grid.rate.argmax(axis=1).tolist()
        return {
            round(num_prefill): SplitPlan(
                max(1, round(float(grid.terms.threshold[column]))), float(grid.rate[row, column])
            )
            for row, (num_prefill, column) in enumerate(
                zip(grid.num_prefill.tolist(), best, strict=True)
            )
        }

    def plans(num_prefill: int, bits_per_s: float) -> SplitPlan | None:
        if not problem.prfaas or bits_per_s < 1:
            return None
        return of_link(round(log(bits_per_s / planned, _STEP))).get(num_prefill)

    return plans
