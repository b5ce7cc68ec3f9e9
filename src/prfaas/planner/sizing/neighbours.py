"""Fleets that a simulation of a plan's size compares: the answer, and one instance less."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prfaas.planner.problem import Problem
from prfaas.planner.sizing.fleet import Fleet, size
from prfaas.planner.solve.designs import DEAD_PER_S, mean_link_price, terabytes_per_h
from prfaas.planner.solve.search import OperatingPoint, optimum
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.solve.within_target import best_operation

LARGER = (1.05, 1.1, 1.2, 1.4)
"""Demands, relative to the requested one, whose fleets are tried next."""


@dataclass(frozen=True)
class FleetCandidate:
    """A fleet with its settings, and the planner's claim about it.

    Args:
        problem: The question with the fleet's numbers of instances.
        carries: The planner's answer: it carries the demand within the targets.
        price_per_h: Price of the machines, and of traffic at the demand, for one hour.
    """

    name: str
    problem: Problem
    found: OperatingPoint
    carries: bool
    price_per_h: float


def sized(problem: Problem, fleet: Fleet) -> Problem:
    """Return the question with a fleet's instances, threshold and split, and no others to try."""
    clusters = tuple(
        replace(cluster, num_instances=count)
        for cluster, count in zip(problem.prfaas, fleet.prfaas, strict=True)
    )
    lengths = problem.workload.lengths
    return replace(
        problem,
        prfaas=clusters,
        pd=replace(problem.pd, num_instances=fleet.pd),
        threshold=lengths.high if fleet.offload_threshold is None else fleet.offload_threshold,
        num_prefill=fleet.num_prefill,
        step_tokens=max(round(lengths.high), 1),
    )


def answered(name: str, problem: Problem, fleet: Fleet) -> FleetCandidate:
    """Return a fleet of the planner's answer."""
    asked = sized(problem, fleet)
    return FleetCandidate(name, asked, optimum(asked, StageMode.EXACT), True, fleet.price_per_h)


def one_less(problem: Problem, fleet: Fleet, demand_per_s: float) -> list[FleetCandidate]:
    """Return a fleet's neighbours with one instance less, each at its best settings."""
    free = replace(sized(problem, fleet), threshold=None, num_prefill=None)
    free = replace(free, step_tokens=_step(problem, free))
    smaller = []
    if free.pd.num_instances > 1:
        pd = replace(free.pd, num_instances=free.pd.num_instances - 1)
        smaller.append((f"one less in {pd.name}", replace(free, pd=pd)))
    for index, cluster in enumerate(free.prfaas):
        if cluster.num_instances:
            less = replace(cluster, num_instances=cluster.num_instances - 1)
            smaller.append((f"one less in {cluster.name}", free.with_cluster(index, less)))
    return [as_given(name, each, demand_per_s) for name, each in smaller]


def as_given(name: str, problem: Problem, demand_per_s: float) -> FleetCandidate:
    """Return a fleet at its best settings, within the targets where they can be met."""
    found = best_operation(problem, StageMode.EXACT)
    carries = found.rate_per_s >= demand_per_s
    if found.rate_per_s < DEAD_PER_S:
        found = optimum(problem, StageMode.EXACT)
    traffic = found.egress_bits_per_s * demand_per_s / found.rate_per_s if found.rate_per_s else 0.0
    at_demand = replace(found, egress_bits_per_s=traffic)
    price = terabytes_per_h(at_demand) * mean_link_price(problem, found)
    return FleetCandidate(name, problem, found, carries, problem.gpu_price_per_h + price)


def larger(problem: Problem, demand_per_s: float) -> list[FleetCandidate]:
    """Return the planner's fleets for somewhat larger demands, each fleet once."""
    seen: list[Fleet] = []
    candidates = []
    for factor in LARGER:
        fleet = size(problem, demand_per_s * factor).cheapest
        if fleet is None or any((f.prfaas, f.pd) == (fleet.prfaas, fleet.pd) for f in seen):
            continue
        seen.append(fleet)
        candidates.append(answered(f"sized for {demand_per_s * factor:.4g} req/s", problem, fleet))
    return candidates


def _step(problem: Problem, fleet: Problem) -> int:
    """Steps of the thresholds: as asked, unless a large fleet makes them too many to try."""
    lengths = problem.workload.lengths
    points = (lengths.high - lengths.low) * fleet.pd.num_instances
    return max(problem.step_tokens, int(points / POINTS_MAX) + 1)


POINTS_MAX = 100_000
"""Largest number of points, thresholds times splits, of a neighbour's search."""
