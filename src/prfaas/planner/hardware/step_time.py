"""Decode step times as a function that costs little to call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from prfaas.planner.hardware.profiles import DecodeProfile
from prfaas.units import NS_PER_S

StepTime = Callable[[int, float], int]


def step_time(profile: DecodeProfile) -> StepTime:
    """Step time in ns by batch and mean context: linear in between, constant outside."""
    batches, contexts = list(profile.batches), list(profile.contexts)
    table = [[step * NS_PER_S for step in row] for row in profile.step_seconds]
    if len(batches) == len(contexts) == 1:
        only = round(table[0][0])
        return lambda _batch, _context: only

    def at(batch: int, context: float) -> int:
        i, u = _place(batches, float(batch))
        j, v = _place(contexts, context)
        i1, j1 = min(i + 1, len(batches) - 1), min(j + 1, len(contexts) - 1)
        near = table[i][j] * (1 - v) + table[i][j1] * v
        far = table[i1][j] * (1 - v) + table[i1][j1] * v
        return max(round(near * (1 - u) + far * u), 1)

    return at


def _place(knots: list[int] | list[float], x: float) -> tuple[int, float]:
    """Index of the knot at or below `x`, and the share of the way to the next."""
    if x <= knots[0]:
        return 0, 0.0
    if x >= knots[-1]:
        return len(knots) - 1, 0.0
    i = bisect_right(knots, x) - 1
    return i, (x - knots[i]) / (knots[i + 1] - knots[i])
