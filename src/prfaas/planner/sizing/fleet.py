"""The cheapest fleet for a demand, within the targets, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prfaas.planner.problem import PrfaasCluster, Problem
from prfaas.planner.solve import throughput as tp
from prfaas.planner.solve.designs import DEAD_PER_S, mean_link_price, terabytes_per_h
from prfaas.planner.solve.latency import best_operation, candidates, meets
from prfaas.planner.solve.search import OperatingPoint, SearchGrid, grid_for, optimum, thresholds
from prfaas.planner.solve.throughput import StageMode, StageTerms
from prfaas.units import BYTES_PER_TB

INSTANCES_MAX = 4096
"""Largest number of PD instances, or of PrfaaS instances of one cluster, that is tried."""
_COLUMNS_MAX = 128  # thresholds that are tried
_TRIES_MAX = 48  # settings of one fleet that are tried with queueing, those with the highest Λ
_COUNTS = 16  # numbers of PrfaaS instances that are tried per pass
_SECONDS_PER_H = 3600


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances and settings that carry a demand."""

    prfaas: tuple[int, ...]
    """Instances of each PrfaaS cluster."""
    pd: int
    """Instances of the PD cluster."""
    num_prefill: int
    offload_threshold: float | None
    """t, tokens; None when nothing is offloaded."""
    price_per_h: float
    """Price of machines, and of traffic at the demand, for one hour."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The cheapest fleets for a demand; None where none within the limit carries it."""

    demand_per_s: float
    cheapest: Fleet | None
    """With or without PrfaaS instances, whichever costs less."""
    homogeneous: Fleet | None


def size(problem: Problem, demand_per_s: float, instances_max: int = INSTANCES_MAX) -> Sizing:
    """Find the cheapest fleets; several PrfaaS clusters keep their proportions.

    Args:
        problem: The question; the sizes of its clusters are only proportions here.
        demand_per_s: Demand, req/s, above 0.
        instances_max: Largest number of instances of a cluster that is tried.
    """
    found = _sized(problem, demand_per_s, instances_max, frozenset())
    left_out: frozenset[int] = frozenset()
    while len(left_out) + 1 < len(problem.prfaas):
        others = [left_out | {i} for i in range(len(problem.prfaas)) if i not in left_out]
        sizings = [_sized(problem, demand_per_s, instances_max, each) for each in others]
        best = min(range(len(others)), key=lambda i: _price(sizings[i].cheapest))
        if not _price(sizings[best].cheapest) < _price(found.cheapest):
            break
        left_out, found = others[best], sizings[best]
    return found


def _sized(
    problem: Problem, demand_per_s: float, instances_max: int, left_out: frozenset[int]
) -> Sizing:
    """`size` without the PrfaaS clusters of these indices."""
    search = _Search(problem, demand_per_s, left_out)
    alone = search.smallest(0, instances_max)
    if not problem.prfaas:
        return Sizing(demand_per_s, alone, alone)
    most = last = instances_max
    if alone is not None:
        most = alone.pd
        last = min(_affordable(search, alone.price_per_h), instances_max)
    fleets = {0: alone}
    first, gap = 0, last
    while gap >= 1:  # counts spread over the range, then around the cheapest
        for count in _spread(first, min(first + gap, last)):
            if count not in fleets:
                fleets[count] = search.smallest(count, most)
        cheapest = min(fleets, key=lambda count: _price(fleets[count]))
        first, gap = max(cheapest - gap // _COUNTS, 0), 2 * gap // _COUNTS
    return Sizing(demand_per_s, min(fleets.values(), key=_price), alone)


def _price(fleet: Fleet | None) -> float:
    return float("inf") if fleet is None else fleet.price_per_h


def _affordable(search: _Search, price_per_h: float) -> int:
    """PrfaaS instances that, with one PD instance, cost no more than a price."""
    one = search.price(1, 1) - search.price(0, 1)
    return int((price_per_h - search.price(0, 1)) / one)


def _spread(first: int, last: int) -> list[int]:
    return [int(x) for x in np.unique(np.linspace(first, last, _COUNTS + 1).round())]


class _Search:
    def __init__(self, problem: Problem, demand_per_s: float, left_out: frozenset[int]) -> None:
        self._problem, self._left_out = replace(problem, num_prefill=None), left_out
        self._demand_per_s = demand_per_s
        self._terms = self._stage_terms()
        kept = (c for i, c in enumerate(problem.prfaas) if i not in left_out)
        self._largest = max((c.num_instances for c in kept), default=0) or 1

    def _stage_terms(self) -> StageTerms:
        tried = thresholds(self._problem)
        spread = np.linspace(0, len(tried) - 1, min(len(tried), _COLUMNS_MAX)).round().astype(int)
        return tp.stage_terms(self._problem, tried[spread], StageMode.EXACT)

    def _fleet(self, prfaas: int, pd: int) -> Problem:
        clusters = tuple(
            self._scaled(cluster, 0 if i in self._left_out else prfaas)
            for i, cluster in enumerate(self._problem.prfaas)
        )
        step = max(round(self._problem.workload.lengths.high), 1)
        return replace(
            self._problem,
            prfaas=clusters,
            pd=replace(self._problem.pd, num_instances=pd),
            step_tokens=step,
        )

    def _scaled(self, cluster: PrfaasCluster, count: int) -> PrfaasCluster:
        share = (cluster.num_instances or 1) / self._largest
        return replace(cluster, num_instances=-int(-count * share // 1))

    def price(self, prfaas: int, pd: int) -> float:
        """Price of the machines for one hour."""
        return self._fleet(prfaas, pd).gpu_price_per_h

    def smallest(self, prfaas: int, most: int) -> Fleet | None:
        """The fewest PD instances, at most `most`, that carry the demand with PrfaaS instances."""
        low, high = 0, 1
        found = self._settings(prfaas, high)
        while found is None:
            if high >= most:
                return None
            low, high = high, min(2 * high, most)
            found = self._settings(prfaas, high)
        while high - low > 1:
            middle = (low + high) // 2
            fewer = self._settings(prfaas, middle)
            if fewer is None:
                low = middle
            else:
                high, found = middle, fewer
        return self._priced(self._fleet(prfaas, high), found)

    def _settings(self, prfaas: int, pd: int) -> OperatingPoint | None:
        problem = self._fleet(prfaas, pd)
        grid = grid_for(problem, self._terms)
        if grid.rate.max() < self._demand_per_s:
            return None
        if problem.ttft_p90_s is None:
            return optimum(problem, StageMode.EXACT, grid)
        return self._within(problem, grid)

    def _within(self, problem: Problem, grid: SearchGrid) -> OperatingPoint | None:
        for tried, found in enumerate(candidates(problem, StageMode.EXACT, grid)):
            if found.rate_per_s < self._demand_per_s or tried >= _TRIES_MAX:
                return None
            if meets(problem, found, self._demand_per_s):
                return found
        return None

    def _priced(self, problem: Problem, found: OperatingPoint) -> Fleet:
        bits_per_s = found.egress_bits_per_s * self._demand_per_s / found.rate_per_s
        terabytes = bits_per_s / tp.BITS * _SECONDS_PER_H / BYTES_PER_TB
        shared = zip(problem.prfaas, found.traffic_shares, strict=True)
        link_price = sum(share * cluster.link.price_per_tb for cluster, share in shared)
        offloads = found.offload_fraction > 1e-9
        return Fleet(
            tuple(cluster.num_instances for cluster in problem.prfaas),
            problem.pd.num_instances,
            found.num_prefill,
            found.offload_threshold if offloads else None,
            problem.gpu_price_per_h + terabytes * link_price,
        )


LARGER = (1.05, 1.1, 1.2, 1.4)
"""Demands, relative to the requested one, whose fleets are tried next."""


@dataclass(frozen=True)
class FleetCandidate:
    """A fleet with its settings, and the planner's claim about it."""

    name: str
    problem: Problem
    """The question with the fleet's numbers of instances."""
    found: OperatingPoint
    carries: bool
    """The planner's answer: it carries the demand within the targets."""
    price_per_h: float
    """Price of the machines, and of traffic at the demand, for one hour."""


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
