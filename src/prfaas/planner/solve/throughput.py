"""Equations (1)-(8) of the paper, for all thresholds at once and in two modes.

The paper feeds its equations with the times of *representative* lengths, T(E[L]). T is convex, so
that overstates capacity; *exact* uses the expectations E[T(L)] instead. Both share every equation:
only the four stage terms below differ.

    symbol                          here
    p                               offload_fraction
    T_prefill(l_long), PrfaaS       prefill_long_s, one row per PrfaaS cluster
    S_kv(l_long)                    wire_long_bytes, one row per PrfaaS cluster
    T_prefill(l_short), PD-P        prefill_short_s

Several PrfaaS clusters share the long requests in proportion to what each can carry, so their
capacities add up. References: arXiv:2604.15039, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np

from prfaas.core.codec.gain import PlannedCodedLink
from prfaas.planner.model.kv_geometry import FloatArray, kv_bytes_at, wire_bytes_at
from prfaas.planner.problem import PdCluster, Problem
from prfaas.planner.workload import LengthDistribution

BITS = 8


class StageMode(StrEnum):
    """Kind of stage times in the equations."""

    PAPER = "paper"
    EXACT = "exact"


@dataclass(frozen=True)
class StageTerms:
    """Mean load of a request on each stage, at every threshold."""

    threshold: FloatArray
    """Offload thresholds, tokens, shape (T,)."""
    offload_fraction: FloatArray
    mean_long: FloatArray
    """l_long, tokens, shape (T,); 0 where nothing is offloaded."""
    mean_short: FloatArray
    """l_short, tokens, shape (T,); 0 where everything is."""
    prefill_long_s: FloatArray
    """Prefill time of offloaded requests, s, shape (clusters, T)."""
    wire_long_bytes: FloatArray
    """Bytes of an offloaded request on each link: its KV bytes, less where the link codes, shape
    (clusters, T)."""
    prefill_short_s: FloatArray
    """Prefill time of local requests on PD-P, s, shape (T,)."""


def kv_throughput(kv_size_bytes: float, prefill_s: float) -> float:
    """Φ_kv of an instance, bit/s: equation (1)."""
    return kv_size_bytes * BITS / prefill_s


def stage_terms(problem: Problem, threshold: FloatArray, mode: StageMode) -> StageTerms:
    """Loads of all stages at each threshold.

    Args:
        mode: Representative lengths or exact expectations.
    """
    threshold = np.asarray(threshold, dtype=np.float64)
    lengths = problem.workload.lengths
    fraction = np.clip(lengths.prob_above(threshold), 0.0, 1.0)
    split = _Split(lengths, threshold, fraction)
    mean_short, mean_long = split.sides(lengths.mean_up_to)

    links = [cluster.coded for cluster in problem.prfaas]

    def wire(link: PlannedCodedLink) -> Callable[[FloatArray], FloatArray]:
        return lambda tokens: wire_bytes_at(problem.geometry, tokens, link)

    work = problem.workload
    if mode is StageMode.PAPER:
        short_prefix, long_prefix = split.expectations(lengths.prefix)
        long_s = [c.prefill.after(long_prefix, mean_long) for c in problem.prfaas]
        wire_long = [wire(link)(mean_long) for link in links]
        short_s = problem.pd.prefill.after(short_prefix, mean_short)
    else:
        long_s = [split.expectations(partial(work.prefill_s, c.prefill))[1] for c in problem.prfaas]
        wire_long = [split.expectations(wire(link))[1] for link in links]
        short_s = split.expectations(partial(work.prefill_s, problem.pd.prefill))[0]
    shape = len(problem.prfaas), len(threshold)
    rows, sizes = (np.array(x, dtype=np.float64).reshape(shape) for x in (long_s, wire_long))
    return StageTerms(threshold, fraction, mean_long, mean_short, rows, sizes, short_s)


@dataclass(frozen=True)
class _Split:
    """Conditional expectations on both sides of each threshold; 0 on an empty side."""

    lengths: LengthDistribution
    threshold: FloatArray
    offload_fraction: FloatArray

    def expectations(
        self, function: Callable[[FloatArray], FloatArray]
    ) -> tuple[FloatArray, FloatArray]:
        """E[f(L)] of local and of offloaded requests."""
        return self.sides(lambda ends: self.lengths.expectation_up_to(function, ends))

    def sides(self, up_to: Callable[[FloatArray], FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Means on both sides from a function that integrates up to each threshold."""
        integral = up_to(np.append(self.threshold, self.lengths.high))
        short = _ratio(integral[:-1], 1 - self.offload_fraction)
        return short, _ratio(integral[-1] - integral[:-1], self.offload_fraction)


def _ratio(part: FloatArray, share: FloatArray) -> FloatArray:
    out = np.zeros_like(part)
    # Below one request in 10**12 the ratio is noise, and the side carries no load anyway.
    np.divide(part, share, out=out, where=share > 1e-12)
    return out


def cluster_throughputs(problem: Problem, terms: StageTerms) -> FloatArray:
    """Throughput of each PrfaaS cluster, req/s, shape (clusters, T): equation (3)."""
    carried = np.zeros_like(terms.prefill_long_s)
    for row, cluster in enumerate(problem.prfaas):
        compute = _rate(cluster.num_instances, terms.prefill_long_s[row])
        network = _rate(cluster.wire_bits_per_s, terms.wire_long_bytes[row] * BITS)
        carried[row] = np.minimum(compute, network)
    return carried


def prfaas_throughput(terms: StageTerms, clusters: FloatArray) -> FloatArray:
    """Θ_prfaas at each threshold, req/s: the sum over clusters; inf where nothing is offloaded."""
    return np.where(terms.offload_fraction > 1e-12, clusters.sum(axis=0), np.inf)


def pd_prefill_throughput(terms: StageTerms, num_prefill: FloatArray) -> FloatArray:
    """Θ_pd-p, req/s: equation (4); returns shape (S, T).

    Args:
        terms: Loads at T thresholds.
        num_prefill: N_p, shape (S, 1).
    """
    local = terms.offload_fraction < 1 - 1e-12
    seconds = np.where(local, terms.prefill_short_s, 1.0)
    return np.where(local, num_prefill / seconds, np.inf)


def decode_throughput(
    problem: Problem, terms: StageTerms, num_decode: FloatArray, pd: PdCluster | None = None
) -> FloatArray:
    """Θ_pd-d, req/s: equation (5), bounded by KV memory when its size is given; returns shape (S,
    T).

    Decode takes the KV memory of a request when it admits it: blocks in transit lie in the pool.

    Args:
        terms: Loads at T thresholds.
        num_decode: N_d, shape (S, 1).
        pd: Decode elsewhere than in `problem.pd`.
    """
    cluster = pd or problem.pd
    batch, step_s = decode_batch(problem, cluster)
    per_instance = np.full_like(terms.threshold, batch / (step_s * problem.workload.output_tokens))
    return np.asarray(num_decode * per_instance, dtype=np.float64)


def decode_batch(
    problem: Problem, cluster: PdCluster, context: float | None = None
) -> tuple[float, float]:
    """Return the sequences that a decode instance runs at once and its step time with them, s.

    The largest batch within the target whose caches fit into the KV memory; 0 when none does both.

    Args:
        context: Mean context of a running sequence, tokens; the workload's if absent.
    """
    context = problem.workload.mean_context if context is None else context
    batch, step_s = cluster.decode.largest_batch(context, cluster.tpot_max_s)
    if cluster.kv_capacity_bytes is None:
        return batch, step_s
    sequence = float(kv_bytes_at(problem.geometry, np.array([context]))[0])
    resident = float(np.floor(cluster.kv_capacity_bytes / sequence))
    if resident >= batch:
        return batch, step_s
    return resident, cluster.decode.step_of(resident, context)


def _rate(supply: float, demand: FloatArray) -> FloatArray:
    out = np.full_like(demand, np.inf)
    np.divide(supply, demand, out=out, where=demand > 0)
    return out


def sustained_rate(
    offload_fraction: FloatArray, prfaas: FloatArray, pd_prefill: FloatArray, decode: FloatArray
) -> FloatArray:
    """Λ_max, req/s: equation (6). All arguments broadcast; a stage without load is inf."""
    p = offload_fraction
    with np.errstate(divide="ignore", invalid="ignore"):
        remote = np.where(p > 1e-12, prfaas / p, np.inf)
        local = np.where(p < 1 - 1e-12, pd_prefill / (1 - p), np.inf)
    return np.asarray(np.minimum(np.minimum(remote, local), decode), dtype=np.float64)
