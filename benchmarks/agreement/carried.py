"""Requests that get their first token at any arrival rate, above Λ_max too."""

from __future__ import annotations

from functools import partial

import numpy as np

from prfaas.planner.problem import Problem
from prfaas.planner.solve import throughput as tp
from prfaas.planner.solve.search import OperatingPoint
from prfaas.planner.solve.throughput import StageMode


def carried(problem: Problem, found: OperatingPoint, arrival_per_s: float) -> float:
    """Return the rate of first tokens at an arrival rate, req/s.

    Below Λ_max it is the arrival rate. Above it, a path that does not bind still carries all of
    its requests. What a link that binds cannot take in time is prefilled in the PD cluster, and
    refused where nothing prefills there. Prefills of both kinds then share the PD-P instances in
    the order of arrival. Decode takes at most its own throughput of all, with the mean context of
    what is prefilled.

    Args:
        problem: The question with the fleet of the settings.
        found: Settings, in exact mode.
        arrival_per_s: Arrival rate, req/s.
    """
    p = found.offload_fraction
    remote = min(arrival_per_s * p, found.prfaas_per_s) if p > 0 else 0.0
    short, long = arrival_per_s * (1 - p), 0.0
    terms = tp.stage_terms(problem, np.array([_threshold(problem, found)]), StageMode.EXACT)
    if p > 0 and _links_bind(problem, terms):
        long = arrival_per_s * p - remote
    work = short * float(terms.prefill_short_s[0]) + long * _local_long_s(problem, found)
    share = 0.0 if found.num_prefill == 0 else min(1.0, found.num_prefill / max(work, 1e-12))
    short, long = short * share, remote + long * share
    return min(short + long, _decode(problem, found, short, long))


def _decode(problem: Problem, found: OperatingPoint, short: float, long: float) -> float:
    """Θ_pd-d for the mix that is prefilled, req/s: above Λ_max it differs from what arrives."""
    if short + long <= 0:
        return found.decode_per_s
    work = problem.workload
    mean = (short * found.mean_short + long * found.mean_long) / (short + long)
    context = work.mean_context - problem.mean_new_tokens + mean
    batch, step_s = tp.decode_batch(problem, problem.pd, context)
    return found.num_decode * batch / (step_s * work.output_tokens)


def _threshold(problem: Problem, found: OperatingPoint) -> float:
    if found.offload_threshold is not None:
        return found.offload_threshold
    lengths = problem.workload.lengths
    return lengths.high if found.offload_fraction == 0 else float(np.nextafter(lengths.low, 0))


def _links_bind(problem: Problem, terms: tp.StageTerms) -> bool:
    """Return True if every cluster's link carries less than its instances prefill."""
    return all(
        cluster.wire_bits_per_s / (float(size[0]) * tp.BITS)
        < cluster.num_instances / float(seconds[0])
        for cluster, seconds, size in zip(
            problem.prfaas, terms.prefill_long_s, terms.wire_long_bytes, strict=True
        )
        if cluster.num_instances
    )


def _local_long_s(problem: Problem, found: OperatingPoint) -> float:
    """Mean prefill time of a request above the threshold on a PD-P instance, s."""
    ends = np.array([_threshold(problem, found), problem.workload.lengths.high])
    prefill_s = partial(problem.workload.prefill_s, problem.pd.prefill)
    below, all_ = problem.workload.lengths.expectation_up_to(prefill_s, ends)
    share = found.offload_fraction
    return float(all_ - below) / share if share > 0 else 0.0
