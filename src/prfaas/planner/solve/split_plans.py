"""The planner's best threshold for every split of the PD instances, for the long-term loop."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import log

import numpy as np

from prfaas.core.control.role_loop import SplitPlan
from prfaas.core.control.split import Plans
from prfaas.core.control.threshold_loop import TrafficMix
from prfaas.errors import ConfigError
from prfaas.planner.model.kv_geometry import kv_bytes_at, wire_bytes_at
from prfaas.planner.problem import PrfaasCluster, Problem, Workload
from prfaas.planner.solve.search import best_thresholds, search_grid
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.workload import EmpiricalLengths

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
