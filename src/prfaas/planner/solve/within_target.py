"""Λ within a target for the P90 of the time to first token, and the settings that reach it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from prfaas.planner.problem import Problem
from prfaas.planner.solve.latency import share_in_time
from prfaas.planner.solve.search import (
    Bottleneck,
    OperatingPoint,
    SearchGrid,
    allowed_rates,
    operation,
    optimum,
    search_grid,
)
from prfaas.planner.solve.throughput import StageMode

TARGET_SHARE = 0.9
_COLUMNS_MAX = 24  # thresholds that are tried with queueing
_NO_LOAD = 1e-9  # of Λ: nobody waits
_STEPS = 20


def best_operation(problem: Problem, mode: StageMode) -> OperatingPoint:
    """The settings with the highest Λ, within the problem's target if it has one."""
    grid = search_grid(problem, mode)
    if problem.ttft_p90_s is None:
        return optimum(problem, mode, grid)
    return within_target(problem, mode, grid)


def within_target(problem: Problem, mode: StageMode, grid: SearchGrid) -> OperatingPoint:
    """The point of a grid with the highest rate at which the TTFT target is met.

    Without a target, the point with the highest Λ. `Bottleneck.TTFT_TARGET` of the answer has the
    rate at which the target binds; it is 0 when the target is missed without any load.
    """
    target = problem.ttft_p90_s
    best, best_rate = optimum(problem, mode, grid), 0.0
    if target is None:
        return best
    for found in candidates(problem, mode, grid):
        if found.rate_per_s <= best_rate:
            break  # the rest sustain less even without a target
        if not meets(problem, found, max(best_rate, _NO_LOAD * found.rate_per_s)):
            continue
        best, best_rate = found, _rate_within(problem, found, best_rate)
    return bounded(best, best_rate)


def candidates(problem: Problem, mode: StageMode, grid: SearchGrid) -> Iterator[OperatingPoint]:
    """Settings that may meet the target, those with the highest Λ first."""
    rates = allowed_rates(problem, grid)
    columns = _columns(rates)
    first = int(np.argmax(rates[:, columns].max(axis=1)))
    meeting = [
        column
        for column in columns
        if meets_idle(problem, operation(problem, mode, grid, first, column))
    ]
    points = [(row, column) for row in range(len(rates)) for column in meeting]
    for row, column in sorted(points, key=lambda at: -rates[at]):
        if rates[row, column] > 0:
            yield operation(problem, mode, grid, row, column)


def _columns(rates: np.typing.NDArray[np.float64]) -> list[int]:
    """Columns spread over the thresholds, the best one and both ends included."""
    count = rates.shape[1]
    spread = np.linspace(0, count - 1, min(count, _COLUMNS_MAX)).round().astype(int)
    return sorted({*spread.tolist(), int(rates.max(axis=0).argmax())})


def meets(problem: Problem, found: OperatingPoint, rate_per_s: float) -> bool:
    """Return True if the P90 at a load is within the target."""
    assert problem.ttft_p90_s is not None  # noqa: S101 (asked with a target only)
    share = share_in_time(problem, found, rate_per_s, problem.ttft_p90_s)
    return share >= TARGET_SHARE - 1e-9


def meets_idle(problem: Problem, found: OperatingPoint) -> bool:
    """Return True if the P90 without any waiting is within the target."""
    assert problem.ttft_p90_s is not None  # noqa: S101 (asked with a target only)
    return share_in_time(problem, found, 0.0, problem.ttft_p90_s) >= TARGET_SHARE - 1e-9


def _rate_within(problem: Problem, found: OperatingPoint, met_at: float) -> float:
    low, high = met_at, found.rate_per_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(problem, found, middle) else (low, middle)
    return low


def bounded(found: OperatingPoint, rate_per_s: float) -> OperatingPoint:
    """The same settings at the rate at which the target binds, req/s."""
    share = rate_per_s / found.rate_per_s if found.rate_per_s else 0.0
    return replace(
        found,
        rate_per_s=rate_per_s,
        egress_bits_per_s=found.egress_bits_per_s * share,
        capacity_per_s={**found.capacity_per_s, Bottleneck.TTFT_TARGET: rate_per_s},
    )
