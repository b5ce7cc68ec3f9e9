"""The compared designs with their prices, and the best threshold for every split of the PD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

import numpy as np

from prfaas.core.control.role_loop import SplitPlan
from prfaas.core.control.split import Plans
from prfaas.core.control.threshold_loop import TrafficMix
from prfaas.errors import ConfigError
from prfaas.planner.model.kv_geometry import kv_bytes_at, wire_bytes_at
from prfaas.planner.problem import PrfaasCluster, Problem, Workload
from prfaas.planner.solve import throughput as tp
from prfaas.planner.solve.latency import best_operation, within_target
from prfaas.planner.solve.search import OperatingPoint, best_thresholds, grid_for, search_grid
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.workload import EmpiricalLengths
from prfaas.units import BYTES_PER_TB

SECONDS_PER_H = 3600
DEAD_PER_S = 1 / SECONDS_PER_H
"""A design that sustains less than this, req/s, has no price for a token."""
LEAST_INSTANCES = 2
"""The smallest homogeneous fleet: one instance prefills, one decodes."""
INSTANCES_MAX = 2**14
"""Largest homogeneous fleet that is tried for a rate."""


@dataclass(frozen=True, slots=True)
class Design:
    """A set of machines, how they are run, and what that costs."""

    name: str
    operation: OperatingPoint
    """Settings and rates at Λ_max."""
    num_gpus: float
    """GPUs of the design; a baseline for the same money may have part of an instance."""
    gpu_price_per_h: float
    """Price of them for one hour."""
    link_price_per_h: float
    """Price of the traffic at Λ_max for one hour."""
    prompt_tokens_per_s: float
    """Prompt tokens, cached ones included, at Λ_max."""

    @property
    def price_per_h(self) -> float:
        """Price of machines and traffic for one hour."""
        return self.gpu_price_per_h + self.link_price_per_h

    @property
    def price_per_mtoken(self) -> float:
        """Price of one million prompt tokens; inf when it sustains less than a request an hour."""
        if self.operation.rate_per_s < DEAD_PER_S:
            return float("inf")
        return self.price_per_h / (self.prompt_tokens_per_s * SECONDS_PER_H / 1e6)


def gain_at_equal_cost(design: Design, other: Design) -> float:
    """Gain of requests per unit of money of `design` over `other`: 0.15 is 15 % more.

    Returns:
        -1 when `design` sustains nothing; inf when only `other` does not.
    """
    if np.isinf(design.price_per_mtoken):
        return -1.0
    return other.price_per_mtoken / design.price_per_mtoken - 1


def prfaas_pd(problem: Problem, mode: StageMode) -> Design:
    """PrfaaS-PD at its optimum."""
    return _priced("PrfaaS-PD", problem, best_operation(problem, mode))


def naive_heterogeneous(problem: Problem, mode: StageMode) -> Design:
    """All prefill on the PrfaaS clusters, all decode in the PD cluster."""
    everything = np.array([np.nextafter(problem.workload.lengths.low, 0)])
    grid = grid_for(problem, tp.stage_terms(problem, everything, mode))
    free = replace(problem, num_prefill=0)
    found = replace(within_target(free, mode, grid), offload_threshold=None)
    return _priced("naive heterogeneous", problem, found)


def homogeneous(problem: Problem, mode: StageMode, num_instances: int, name: str) -> Design:
    """PD instances alone, at their best split."""
    pd = replace(problem.pd, num_instances=num_instances)
    # One threshold is tried, so the step does not count against the size of the search.
    step = max(round(problem.workload.lengths.high), 1)
    alone = replace(problem, prfaas=(), pd=pd, num_prefill=None, step_tokens=step)
    nothing = np.array([problem.workload.lengths.high])
    grid = grid_for(alone, tp.stage_terms(alone, nothing, mode))
    found = replace(within_target(alone, mode, grid), offload_threshold=None)
    none = tuple(0.0 for _ in problem.prfaas)
    return replace(
        _priced(name, alone, found),
        operation=replace(found, cluster_shares=none, traffic_shares=none),
    )


def homogeneous_fraction(problem: Problem, mode: StageMode, instances: float, name: str) -> Design:
    """PD instances alone, part of an instance included.

    Between whole numbers every rate is interpolated: a fleet of 12.3 instances is 70 % a fleet of
    12 and 30 % a fleet of 13. With whole instances, gains would jump with prices. The split that is
    shown, and its latency, are the smaller fleet's.

    Args:
        mode: How stage terms are computed.
        instances: Of the fleet; below `LEAST_INSTANCES` it is the smallest fleet.
    """
    count = max(instances, float(LEAST_INSTANCES))
    whole = int(count + 1e-9)
    share = count - whole
    fewer = homogeneous(problem, mode, whole, name)
    if share < 1e-9:
        return fewer
    return _blended(fewer, homogeneous(problem, mode, whole + 1, name), share)


def _blended(fewer: Design, more: Design, share: float) -> Design:
    def between(low: float, high: float) -> float:
        return low + share * (high - low) if np.isfinite(high - low) else low

    a, b = fewer.operation, more.operation
    found = replace(
        a,
        rate_per_s=between(a.rate_per_s, b.rate_per_s),
        pd_prefill_per_s=between(a.pd_prefill_per_s, b.pd_prefill_per_s),
        decode_per_s=between(a.decode_per_s, b.decode_per_s),
        capacity_per_s={
            stage: between(rate, b.capacity_per_s[stage])
            for stage, rate in a.capacity_per_s.items()
        },
    )
    return replace(
        fewer,
        operation=found,
        num_gpus=between(fewer.num_gpus, more.num_gpus),
        gpu_price_per_h=between(fewer.gpu_price_per_h, more.gpu_price_per_h),
        prompt_tokens_per_s=between(fewer.prompt_tokens_per_s, more.prompt_tokens_per_s),
    )


def equal_gpus(problem: Problem, mode: StageMode) -> Design:
    """The homogeneous design with as many GPUs, part of an instance included."""
    instances = _num_gpus(problem) / problem.pd.gpus_per_instance
    return homogeneous_fraction(problem, mode, instances, "homogeneous, equal GPUs")


def equal_cost(problem: Problem, mode: StageMode, budget_per_h: float | None = None) -> Design:
    """The homogeneous design that the same money buys, part of an instance included.

    Args:
        mode: How stage terms are computed.
        budget_per_h: Money for one hour; None is the price of the GPUs of `problem`.
    """
    budget = problem.gpu_price_per_h if budget_per_h is None else budget_per_h
    instances = budget / problem.pd.price_per_instance_h
    return homogeneous_fraction(problem, mode, instances, "homogeneous, equal cost")


def instances_for(problem: Problem, mode: StageMode, rate_per_s: float) -> float:
    """Instances of the homogeneous fleet that sustains a rate, part of an instance included;
    returns inf when no fleet of up to `INSTANCES_MAX` sustains it.

    Args:
        mode: How stage terms are computed.
        rate_per_s: Rate of requests, req/s.
    """

    def rate(count: int) -> float:
        return homogeneous(problem, mode, count, "").operation.rate_per_s

    high = LEAST_INSTANCES
    while rate(high) < rate_per_s:
        high *= 2
        if high > INSTANCES_MAX:
            return float("inf")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rate(middle) >= rate_per_s else (middle, high)
    if high <= LEAST_INSTANCES:
        return LEAST_INSTANCES * rate_per_s / rate(LEAST_INSTANCES)
    below, above = rate(high - 1), rate(high)
    return high - 1 + (rate_per_s - below) / (above - below)


def _num_gpus(problem: Problem) -> int:
    pd = problem.pd.num_instances * problem.pd.gpus_per_instance
    return pd + sum(c.num_instances * c.gpus_per_instance for c in problem.prfaas)


def _priced(name: str, problem: Problem, found: OperatingPoint) -> Design:
    return Design(
        name=name,
        operation=found,
        num_gpus=_num_gpus(problem),
        gpu_price_per_h=problem.gpu_price_per_h,
        link_price_per_h=terabytes_per_h(found) * mean_link_price(problem, found),
        prompt_tokens_per_s=found.rate_per_s * problem.workload.mean_prompt_tokens,
    )


def terabytes_per_h(found: OperatingPoint) -> float:
    """Traffic of all links at Λ_max, 10**12 bytes an hour."""
    return found.egress_bits_per_s / tp.BITS * SECONDS_PER_H / BYTES_PER_TB


def mean_link_price(problem: Problem, found: OperatingPoint) -> float:
    """Price of 10**12 bytes, averaged over clusters by their traffic."""
    shared = zip(problem.prfaas, found.traffic_shares, strict=True)
    return sum(share * cluster.link.price_per_tb for cluster, share in shared)


_STEP = 1.1
"""Links whose capacities differ by less than this factor share a plan."""
_PLANS_MAX = 16
"""Plans that are kept."""


def split_plans(problem: Problem) -> Plans:
    """Plans of a deployment's splits, for links of any total capacity; each is made once."""
    planned = sum(_block_bits_per_s(c, problem) for c in problem.prfaas)

    @lru_cache(_PLANS_MAX)
    def of(step: int, mix: TrafficMix | None) -> dict[int, SplitPlan]:
        prfaas = tuple(
            replace(c, link=c.link.measured(c.goodput_bits_per_s * _STEP**step))
            for c in problem.prfaas
        )
        workload = _workload(problem.workload, mix)
        try:
            grid = search_grid(replace(problem, prfaas=prfaas, workload=workload), StageMode.EXACT)
        except ConfigError:
            return {}  # such requests miss the plan's targets whatever is done
        return {
            round(num_prefill): SplitPlan(
                max(1, int(grid.terms.threshold[column])), float(grid.rate[row, column])
            )
            for row, (num_prefill, column) in enumerate(
                zip(grid.num_prefill.tolist(), best_thresholds(grid), strict=True)
            )
        }

    def plans(num_prefill: int, bits_per_s: float, mix: TrafficMix | None) -> SplitPlan | None:
        if not problem.prfaas or bits_per_s < 1:
            return None
        return of(round(log(bits_per_s / planned, _STEP)), mix).get(num_prefill)

    return plans


def _block_bits_per_s(cluster: PrfaasCluster, problem: Problem) -> float:
    """Rate that gateways measure: bytes of blocks, of a hand-off of mean length."""
    if not cluster.coded.is_coding:
        return cluster.wire_bits_per_s
    tokens, geometry = np.array([problem.mean_new_tokens]), problem.geometry
    wire = wire_bytes_at(geometry, tokens, cluster.coded)
    return cluster.wire_bits_per_s * float(kv_bytes_at(geometry, tokens)[0] / wire[0])


def _workload(planned: Workload, mix: TrafficMix | None) -> Workload:
    """The traffic of a plan, or what is seen of it, within the lengths that the plan knows."""
    if mix is None:
        return planned
    low, high = planned.lengths.low, planned.lengths.high
    lengths = tuple(min(max(float(new), low), high) for new in mix.new_tokens)
    if len(set(lengths)) < 2:
        return planned
    prefix = max(mix.mean_prompt_tokens - sum(lengths) / len(lengths), 0.0)
    prefixes = tuple(min(prefix, planned.lengths.whole_high - new) for new in lengths)
    return replace(
        planned,
        lengths=EmpiricalLengths(lengths, prefixes),
        mean_prompt_tokens=mix.mean_prompt_tokens,
        output_tokens=max(mix.mean_output_tokens, 1.0),
    )
