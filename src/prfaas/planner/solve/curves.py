"""The data of the two figures of the paper: Λ against the threshold, and against the split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.planner.problem import Problem
from prfaas.planner.solve import throughput as tp
from prfaas.planner.solve.search import OperatingPoint, SearchGrid, grid_for, search_grid
from prfaas.planner.solve.throughput import StageMode


@dataclass(frozen=True)
class Curve:
    """Rates along one setting; a stage without load is nan.

    Args:
        x: Thresholds in tokens, or N_p; shape (X,).
        prfaas: Rate at which PrfaaS binds, req/s, shape (X,).
        pd_prefill: Rate at which PD-P binds, req/s, shape (X,).
        decode: Rate at which PD-D binds, req/s, shape (X,).
        rate: Λ, req/s, shape (X,).
    """

    x: FloatArray
    prfaas: FloatArray
    pd_prefill: FloatArray
    decode: FloatArray
    rate: FloatArray


def against_threshold(problem: Problem, found: OperatingPoint) -> Curve:
    """Λ and its stages against t, at the split of `found`."""
    grid = search_grid(problem, found.mode)
    row = found.num_prefill
    remote, local = _producers(grid)
    return Curve(
        grid.terms.threshold, remote, _finite(local[row]), grid.decode[row], grid.rate[row]
    )


def against_split(problem: Problem, found: OperatingPoint) -> Curve:
    """Λ and its stages against N_p, at the threshold of `found`."""
    threshold = found.offload_threshold
    at = problem.workload.lengths.high if threshold is None else threshold
    grid = grid_for(problem, tp.stage_terms(problem, np.array([at]), found.mode))
    remote, local = _producers(grid)
    return Curve(
        grid.num_prefill,
        np.full_like(grid.num_prefill, remote[0]),
        _finite(local[:, 0]),
        grid.decode[:, 0],
        grid.rate[:, 0],
    )


def best_of_each_split(problem: Problem, mode: StageMode) -> tuple[FloatArray, FloatArray]:
    """The highest Λ over all thresholds for every N_p, req/s, and its threshold, tokens."""
    grid = search_grid(problem, mode)
    best = grid.rate.argmax(axis=1)
    return grid.rate.max(axis=1), grid.terms.threshold[best]


def _producers(grid: SearchGrid) -> tuple[FloatArray, FloatArray]:
    p = grid.terms.offload_fraction
    with np.errstate(divide="ignore", invalid="ignore"):
        return _finite(grid.prfaas / p), grid.pd_prefill / (1 - p)


def _finite(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, np.nan)
