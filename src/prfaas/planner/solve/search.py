"""The search for the best settings, and curves around them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor

import numpy as np

from prfaas.errors import ConfigError
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.planner.problem import Problem
from prfaas.planner.solve import throughput as tp
from prfaas.planner.solve.throughput import StageMode, StageTerms

# Rates that differ by less are the same: ties go to the highest threshold, which ships least.
_TIE = 1e-9
_TIGHT = 0.005  # of the capacity: a stage with less slack binds


class Bottleneck(StrEnum):
    """A stage that can bind."""

    PRFAAS_COMPUTE = "PrfaaS prefill"
    PRFAAS_NETWORK = "PrfaaS egress"
    PD_PREFILL = "PD-P prefill"
    PD_DECODE = "PD-D decode"
    TTFT_TARGET = "TTFT target"


@dataclass(frozen=True)
class SearchGrid:
    """Λ at every point of the search, and the stages behind it."""

    num_prefill: FloatArray
    """N_p of each row, shape (S,)."""
    terms: StageTerms
    """Loads at each of T thresholds."""
    clusters: FloatArray
    """Throughput of each PrfaaS cluster, req/s, shape (clusters, T)."""
    prfaas: FloatArray
    """Θ_prfaas, req/s, shape (T,)."""
    pd_prefill: FloatArray
    """Θ_pd-p, req/s, shape (S, T)."""
    decode: FloatArray
    """Θ_pd-d, req/s, shape (S, T)."""
    rate: FloatArray
    """Λ, req/s, shape (S, T)."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Settings of the system, and its sustained rate."""

    mode: StageMode
    """How the stage terms were computed."""
    offload_threshold: float | None
    """t, tokens; None when nothing is routed by length."""
    num_prfaas: int
    """PrfaaS prefill instances of all clusters."""
    num_prefill: int
    num_decode: int
    offload_fraction: float
    mean_long: float
    """l_long, tokens."""
    mean_short: float
    prfaas_per_s: float
    """Θ_prfaas, req/s; inf without offloading."""
    pd_prefill_per_s: float
    """Θ_pd-p, req/s; inf when all is offloaded."""
    decode_per_s: float
    """Θ_pd-d, req/s."""
    rate_per_s: float
    egress_bits_per_s: float
    """Traffic of all PrfaaS links at Λ_max, as the network sees it."""
    cluster_shares: tuple[float, ...]
    """Share of the offloaded requests that each PrfaaS cluster takes."""
    traffic_shares: tuple[float, ...]
    """Share of the traffic of each PrfaaS link; differs where one codes and another does not."""
    capacity_per_s: dict[Bottleneck, float]
    """Rate Λ at which each stage alone would bind, req/s."""

    @property
    def whole_threshold(self) -> int | None:
        """The threshold of gateways and simulations, tokens; None when nothing is routed by length.

        Prompts have whole numbers of tokens: those above t are above the whole number below it.
        Where nothing is offloaded, no prompt is above the whole number above it.
        """
        t = self.offload_threshold
        if t is None:
            return None
        return ceil(t) if self.offload_fraction <= 0 else floor(t)

    @property
    def binding(self) -> Bottleneck:
        """The stage that limits Λ."""
        return min(self.capacity_per_s, key=lambda stage: self.capacity_per_s[stage])

    @property
    def narrowest(self) -> Bottleneck:
        """The stage with the lowest capacity, targets aside."""
        stages = [stage for stage in self.capacity_per_s if stage is not Bottleneck.TTFT_TARGET]
        return min(stages, key=lambda stage: self.capacity_per_s[stage])

    @property
    def binding_in_words(self) -> str:
        """Stages with less than `_TIGHT` of slack, as a clause: "A and B bind"."""
        *others, last = [s.value for s in self.capacity_per_s if self.slack(s) < _TIGHT] or [
            self.binding.value
        ]
        return f"{', '.join(others)} and {last} bind" if others else f"{last} binds"

    def slack(self, stage: Bottleneck) -> float:
        """Share of a stage's capacity that is idle at Λ_max, in [0, 1]."""
        capacity = self.capacity_per_s[stage]
        if capacity <= 0:  # a stage without instances has no capacity that could be idle
            return 0.0
        return 1.0 if np.isinf(capacity) else 1 - self.rate_per_s / capacity


def thresholds(problem: Problem) -> FloatArray:
    """Thresholds that the search tries: multiples of the step, and both ends of the lengths.

    The lower end offloads everything, the upper end nothing. A threshold given by the problem is
    the only one.
    """
    if problem.threshold is not None:
        return np.array([problem.threshold], dtype=np.float64)
    lengths, step = problem.workload.lengths, problem.step_tokens
    first, last = np.floor(lengths.low / step) + 1, np.ceil(lengths.high / step)
    inner = np.arange(first, last) * step
    return np.concatenate(([np.nextafter(lengths.low, 0)], inner, [lengths.high]))


def search_grid(problem: Problem, mode: StageMode) -> SearchGrid:
    """Λ for every threshold and every split with at least one decode instance."""
    terms = tp.stage_terms(problem, thresholds(problem), mode)
    return grid_for(problem, terms)


def grid_for(problem: Problem, terms: StageTerms) -> SearchGrid:
    """Λ for given stage terms and every split with at least one decode instance."""
    num_prefill = np.arange(problem.pd.num_instances, dtype=np.float64)
    num_decode = problem.pd.num_instances - num_prefill
    clusters = tp.cluster_throughputs(problem, terms)
    prfaas = tp.prfaas_throughput(terms, clusters)
    pd_prefill = tp.pd_prefill_throughput(terms, num_prefill[:, None])
    decode = tp.decode_throughput(problem, terms, num_decode[:, None])
    rate = tp.sustained_rate(terms.offload_fraction, prfaas, pd_prefill, decode)
    return SearchGrid(num_prefill, terms, clusters, prfaas, pd_prefill, decode, rate)


def best_thresholds(grid: SearchGrid) -> list[int]:
    """Column of the best threshold of each row, in shape (S,).

    Where decode binds many thresholds sustain as much; the one that leaves prefill, local and
    remote, the most room is the best of them.
    """
    room = tp.sustained_rate(
        grid.terms.offload_fraction, grid.prfaas, grid.pd_prefill, np.array(np.inf)
    )
    ties = grid.rate >= grid.rate.max(axis=1, keepdims=True) * (1 - _TIE)
    return [int(column) for column in np.where(ties, room, -1.0).argmax(axis=1)]


def optimum(problem: Problem, mode: StageMode, grid: SearchGrid | None = None) -> OperatingPoint:
    """The threshold and split with the highest Λ, at the problem's N_p if it gives one."""
    found = grid or search_grid(problem, mode)
    rate = allowed_rates(problem, found)
    ties = np.argwhere(rate >= rate.max() * (1 - _TIE))
    row, column = max(ties.tolist(), key=lambda index: (index[1], -index[0]))
    return operation(problem, mode, found, row, column)


def allowed_rates(problem: Problem, grid: SearchGrid) -> FloatArray:
    """Λ of a grid, req/s, shape (S, T); -1 at splits other than a given N_p."""
    if problem.num_prefill is None:
        return grid.rate
    return np.where(grid.num_prefill[:, None] == problem.num_prefill, grid.rate, -1.0)


def operation(
    problem: Problem, mode: StageMode, grid: SearchGrid, row: int, column: int
) -> OperatingPoint:
    """The point of a grid at one split and one threshold."""
    terms, rate = grid.terms, float(grid.rate[row, column])
    p = float(terms.offload_fraction[column])
    num_prefill = int(grid.num_prefill[row])
    shares, sizes = _shares(grid.clusters[:, column]), terms.wire_long_bytes[:, column].tolist()
    size = _mean_size(shares, sizes)
    return OperatingPoint(
        mode=mode,
        offload_threshold=float(terms.threshold[column]),
        num_prfaas=sum(cluster.num_instances for cluster in problem.prfaas),
        num_prefill=num_prefill,
        num_decode=problem.pd.num_instances - num_prefill,
        offload_fraction=p,
        mean_long=float(terms.mean_long[column]),
        mean_short=float(terms.mean_short[column]),
        prfaas_per_s=float(grid.prfaas[column]),
        pd_prefill_per_s=float(grid.pd_prefill[row, column]),
        decode_per_s=float(grid.decode[row, column]),
        rate_per_s=rate,
        egress_bits_per_s=rate * p * size * tp.BITS,
        cluster_shares=shares,
        traffic_shares=tuple(
            share * (each / size) if size else 0.0
            for share, each in zip(shares, sizes, strict=True)
        ),
        capacity_per_s=_capacities(problem, grid, row, column),
    )


def _shares(carried: FloatArray) -> tuple[float, ...]:
    total = float(carried.sum())
    if not 0 < total < np.inf:
        return tuple(0.0 for _ in carried)
    return tuple((carried / total).tolist())


def _mean_size(shares: tuple[float, ...], sizes: list[float]) -> float:
    """Mean bytes of an offloaded request on the links."""
    if not sizes:
        return 0.0
    first = sizes[0]
    return first + sum(s * (size - first) for s, size in zip(shares, sizes, strict=True))


def _capacities(
    problem: Problem, grid: SearchGrid, row: int, column: int
) -> dict[Bottleneck, float]:
    terms = grid.terms
    p = float(terms.offload_fraction[column])
    compute = network = np.inf
    if p > 1e-12:
        seconds, sizes = terms.prefill_long_s[:, column], terms.wire_long_bytes[:, column].tolist()
        per_cluster = [c.num_instances / s for c, s in zip(problem.prfaas, seconds, strict=True)]
        compute = sum(per_cluster) / p
        first = sizes[0] if sizes else 1.0
        links = zip(problem.prfaas, sizes, strict=True)
        bits_per_s = sum(c.wire_bits_per_s * (first / size) for c, size in links)
        network = bits_per_s / (first * tp.BITS) / p
        # Clusters that bind on different sides carry less than either sum alone.
        together = grid.prfaas[column] / p
        compute, network = (together, network) if compute <= network else (compute, together)
    local = grid.pd_prefill[row, column] / (1 - p) if p < 1 - 1e-12 else np.inf
    return {
        Bottleneck.PRFAAS_COMPUTE: float(compute),
        Bottleneck.PRFAAS_NETWORK: float(network),
        Bottleneck.PD_PREFILL: float(local),
        Bottleneck.PD_DECODE: float(grid.decode[row, column]),
    }


def at_threshold(problem: Problem, mode: StageMode, threshold: float) -> OperatingPoint:
    """The best split at a given threshold; ConfigError if the threshold is outside the workload's
    lengths."""
    check_threshold(problem, threshold)
    terms = tp.stage_terms(problem, np.array([float(threshold)]), mode)
    grid = grid_for(problem, terms)
    return operation(problem, mode, grid, int(np.argmax(allowed_rates(problem, grid)[:, 0])), 0)


def check_threshold(problem: Problem, threshold: float) -> None:
    """Refuse a threshold that no prompt, or every prompt, exceeds; ConfigError if the threshold is
    outside the workload's lengths."""
    lengths = problem.workload.lengths
    if not lengths.low <= threshold <= lengths.high:
        raise ConfigError(
            f"threshold {threshold:.0f} is outside the workload's lengths, {lengths.low:.0f} to "
            f"{lengths.high:.0f} tokens"
        )


@dataclass(frozen=True)
class Curve:
    """Rates along one setting; a stage without load is nan."""

    x: FloatArray
    """Thresholds in tokens, or N_p; shape (X,)."""
    prfaas: FloatArray
    """Rate at which PrfaaS binds, req/s, shape (X,)."""
    pd_prefill: FloatArray
    """Rate at which PD-P binds, req/s, shape (X,)."""
    decode: FloatArray
    """Rate at which PD-D binds, req/s, shape (X,)."""
    rate: FloatArray
    """Λ, req/s, shape (X,)."""


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


def _producers(grid: SearchGrid) -> tuple[FloatArray, FloatArray]:
    p = grid.terms.offload_fraction
    with np.errstate(divide="ignore", invalid="ignore"):
        return _finite(grid.prfaas / p), grid.pd_prefill / (1 - p)


def _finite(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, np.nan)
