"""Confidence of a plan whose load rests on few long prompts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.planner.problem import Problem
from prfaas.planner.solve.search import Bottleneck, OperatingPoint

REQUESTS = 16_000
"""Number of requests for the variation of a load: a long simulation, or an hour at 4 req/s."""
WANDER_MAX = 0.05
"""A load that varies by more (two standard errors) is noted."""
_NEAR = 0.2  # stages with less slack decide the result


def few_long_prompts(problem: Problem, found: OperatingPoint) -> list[str]:
    """A note for each prefill stage near its limit whose load rests on few long prompts."""
    return [
        f"{stage.value}: {_half(load, weight):.1%} of all requests, the longest, carry "
        f"half of its load, so it varies by ±{wander:.0%} over {REQUESTS:,} requests; "
        "simulate several seeds, or plan with a longer trace"
        for stage, load, weight in _near_limit(problem, found)
        if (wander := 2 * _relative_error(load, weight)) > WANDER_MAX
    ]


def noted_variation(problem: Problem, found: OperatingPoint) -> float:
    """Largest variation that `few_long_prompts` notes, two standard errors; 0 without one."""
    near = _near_limit(problem, found)
    variations = (2 * _relative_error(load, weight) for _, load, weight in near)
    return max((wander for wander in variations if wander > WANDER_MAX), default=0.0)


def rate_variation(problem: Problem, found: OperatingPoint) -> float:
    """Variation of a rate that a prefill stage limits, two standard errors as a share of it.

    0 where none is near its limit.
    """
    near = _near_limit(problem, found)
    return max((2 * _relative_error(load, weight) for _, load, weight in near), default=0.0)


def load_variation(problem: Problem, found: OperatingPoint) -> float:
    """Return the variation of all prefill work by a stage near its limit, two standard errors.

    A stage that few requests load varies much and matters little: it counts with its share of the
    work, in time of the PD cluster.
    """
    tokens, weight = problem.workload.lengths.sample()
    work = problem.workload.prefill_s(problem.pd.prefill, tokens) * weight
    return max(
        (
            2 * _relative_error(load, weight) * float(np.sum(work[load > 0]) / np.sum(work))
            for _, load, weight in _near_limit(problem, found)
        ),
        default=0.0,
    )


def _near_limit(
    problem: Problem, found: OperatingPoint
) -> Iterator[tuple[Bottleneck, FloatArray, FloatArray]]:
    """Prefill stages near their limit, with the load of each length and its weight."""
    tokens, weight = problem.workload.lengths.sample()
    high = problem.workload.lengths.high
    threshold = high if found.offload_threshold is None else found.offload_threshold
    for stages, side, profile in (
        (
            (Bottleneck.PRFAAS_COMPUTE, Bottleneck.PRFAAS_NETWORK),
            tokens > threshold,
            problem.prfaas[0].prefill if problem.prfaas else None,
        ),
        ((Bottleneck.PD_PREFILL,), tokens <= threshold, problem.pd.prefill),
    ):
        near = [s for s in stages if found.rate_per_s and found.slack(s) < _NEAR]
        if profile is None or not near or not side.any():
            continue
        yield near[0], np.where(side, profile.at(tokens), 0.0), weight


def _relative_error(load: FloatArray, weight: FloatArray) -> float:
    """Standard error of the mean load over `REQUESTS` requests, relative to the mean."""
    mean = float(np.average(load, weights=weight))
    variance = float(np.average((load - mean) ** 2, weights=weight))
    return float(np.sqrt(variance / REQUESTS) / mean)


def _half(load: FloatArray, weight: FloatArray) -> float:
    """Share of requests that carries half of the load, those with the most load first."""
    order = np.argsort(-load)
    carried = np.cumsum((load * weight)[order])
    last = int(np.searchsorted(carried, carried[-1] / 2))
    return float(weight[order][: last + 1].sum())
