"""One point of the map: the plan on a path, its gain, and the basis of the gain.

A point *pays* or *does not pay* when its gain at equal cost, with exact expectations, is further
from zero than the planner's own error and everything it rests on was measured. All others are *not
yet proven*; `Doubt` lists why.

Crossover: the bandwidth at which prefill-as-a-service begins to pay, and what moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from prfaas import units as w
from prfaas.core.transfer.tcp_goodput import (
    MEASURED,
    CongestionControl,
    TcpEnds,
    TcpPath,
    most_bits_per_s,
)
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.problem import PrfaasCluster, Problem
from prfaas.planner.sizing.obstacles import doubt, load_variation
from prfaas.planner.solve import designs, sensitivity
from prfaas.planner.solve.designs import Design, gain_at_equal_cost
from prfaas.planner.solve.throughput import StageMode

PLANNER_ERROR = 0.07
"""Gains closer to zero are within the planner's error, the largest difference to the simulator in
docs/results/fit.md."""
EXTRAPOLATED_MAX = 0.05
"""Share of the prefill time that prompts longer than any measured one may have."""


class Fit(StrEnum):
    """Verdict on a point of the map."""

    PAYS = "pays"
    DOES_NOT_PAY = "does not pay"
    NOT_PROVEN = "not yet proven"


class Doubt(StrEnum):
    """Reason why a point is not yet proven."""

    ERROR = "the gain is within the planner's error"
    LATENCY = "the gain is bought with a longer TTFT, and the plan has no slo.ttft_p90"
    TRANSPORT = "it rests on a transport that was never measured"
    PROFILE = "prefill times are extrapolated beyond the longest measured prompt"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the map."""

    path: TcpPath
    """Bandwidth, round trip and loss."""
    goodput_bits_per_s: float
    """Part of the bandwidth that TCP carries."""
    gain: float
    """At equal cost; inf where only the homogeneous fleet fails."""
    fit: Fit
    doubt: Doubt | None = None
    """Reason why it is not yet proven, or None."""
    reason: str = ""
    """The same with figures, for people; "" where it is proven."""


@dataclass(frozen=True)
class PathPlans:
    """Plans of one problem on any path.

    Several PrfaaS clusters have the round trip and loss of the path each, and keep their shares of
    the bandwidth."""

    problem: Problem
    """The question; its links count only as shares of the bandwidth."""
    transport: TcpEnds
    """Both ends; `num_nodes` 0 is what the plan has for each link, `connections` 0 what a node
    opens."""
    demand_per_s: float | None = None
    """Demand, req/s, or None."""

    @cached_property
    def _extrapolated(self) -> float:
        """Largest share of the prefill time beyond the knots, of any cluster."""
        return max(_beyond_knots(p, self.problem) for p in self.problem.prefill_profiles)

    @cached_property
    def _known(self) -> dict[tuple[tuple[float, ...], float], tuple[Design, Design, float]]:
        """Designs by what the links carry, and the round trip."""
        return {}

    def gain(self, path: TcpPath) -> float:
        """Gain at equal cost on a path."""
        return self._designs(self.on(path), path.rtt_s)[2]

    def best_gain(self, path: TcpPath) -> float:
        """Gain if the path, or all send buffers, were full."""
        full = tuple(
            replace(c, link=c.link.measured(most_bits_per_s(c.link.path, c.transport or TcpEnds())))
            for c in self.on(path).prfaas
        )
        return self._designs(replace(self.problem, prfaas=full), path.rtt_s)[2]

    def point(self, path: TcpPath) -> Point:
        """Plan on a path, and judge the gain."""
        problem = self.on(path)
        ours, other, gain = self._designs(problem, path.rtt_s)
        carried = self.demand_per_s is None or self.demand_per_s <= ours.operation.rate_per_s
        fit = Fit.PAYS if gain > 0 and carried else Fit.DOES_NOT_PAY
        doubted, reason = self._doubt(path, ours, other, gain) if carried else (None, "")
        if doubted is not None:
            fit = Fit.NOT_PROVEN
        carried_bits_per_s = sum(cluster.goodput_bits_per_s for cluster in problem.prfaas)
        return Point(path, carried_bits_per_s, gain, fit, doubted, reason)

    def _doubt(
        self, path: TcpPath, ours: Design, other: Design, gain: float
    ) -> tuple[Doubt | None, str]:
        margin = max(PLANNER_ERROR, load_variation(self.problem, ours.operation))
        if abs(gain) <= margin:
            return Doubt.ERROR, f"gain within ±{margin:.0%}"
        if self._extrapolated > EXTRAPOLATED_MAX:
            return Doubt.PROFILE, f"{self._extrapolated:.0%} of the prefill time is extrapolated"
        gaps = self._gaps(path, ours.operation.egress_bits_per_s)
        # A loss is proven as well where it would be one with all that TCP could carry at best.
        if gaps and (gain > 0 or self.best_gain(path) > -margin):
            return Doubt.TRANSPORT, "; ".join(gaps)
        if gain < 0:
            return None, ""
        late = doubt(self.on(path), ours, other)
        return (Doubt.LATENCY, late) if late else (None, "")

    def _designs(self, problem: Problem, rtt_s: float) -> tuple[Design, Design, float]:
        key = tuple(cluster.goodput_bits_per_s for cluster in problem.prfaas), rtt_s
        if key not in self._known:
            ours = designs.prfaas_pd(problem, StageMode.EXACT)
            other = designs.equal_cost(problem, StageMode.EXACT, ours.price_per_h)
            self._known[key] = ours, other, gain_at_equal_cost(ours, other)
        return self._known[key]

    def on(self, path: TcpPath) -> Problem:
        """The question on a path."""
        total = sum(c.link.bits_per_s for c in self.problem.prfaas)
        clusters = tuple(
            replace(
                c,
                link=replace(
                    c.link,
                    bits_per_s=path.bits_per_s * c.link.bits_per_s / total,
                    rtt_s=path.rtt_s,
                    loss=path.loss,
                    transport=self._transport(c),
                ),
            )
            for c in self.problem.prfaas
        )
        return replace(self.problem, prfaas=clusters)

    def _transport(self, cluster: PrfaasCluster) -> TcpEnds:
        planned = cluster.transport
        nodes = cluster.num_hosts if planned is None else planned.num_nodes
        connections = 0 if planned is None else planned.connections
        return replace(
            self.transport,
            num_nodes=self.transport.num_nodes or nodes,
            connections=self.transport.connections or connections,
        )

    def _gaps(self, path: TcpPath, egress_bits_per_s: float) -> list[str]:
        nodes = sum(self._transport(cluster).num_nodes for cluster in self.problem.prfaas)
        return MEASURED.gaps(path, replace(self.transport, num_nodes=nodes), egress_bits_per_s)


def _beyond_knots(profile: PrefillProfile, problem: Problem) -> float:
    """Share of the prefill time that prompts above the last knot have."""
    tokens, weight = problem.workload.lengths.sample()
    load = profile.at(tokens) * weight
    return float(np.sum(load[tokens > profile.lengths[-1] * 1.01]) / np.sum(load))


LEAST_BITS_PER_S, MOST_BITS_PER_S = 1e6, 1e13
TOLERANCE = 0.01
"""Width at which the bisection stops, as a share of the bandwidth."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Bandwidth above which the gain at equal cost is positive."""

    bits_per_s: float
    """Bandwidth; 0 when it pays at any, inf when at none."""

    @property
    def text(self) -> str:
        """The bandwidth, "any" or "never"."""
        if self.bits_per_s == 0:
            return "any"
        return "never" if math.isinf(self.bits_per_s) else w.bandwidth(self.bits_per_s)


def crossover(gain: Callable[[float], float]) -> Crossover:
    """Find the bandwidth at which a gain turns positive, by bisection.

    Args:
        gain: Gain at equal cost at a bandwidth, bit/s; rises with it.
    """
    low, high = LEAST_BITS_PER_S, MOST_BITS_PER_S
    if gain(high) <= 0:
        return Crossover(math.inf)
    if gain(low) > 0:
        return Crossover(0.0)
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return Crossover(high)


SWING = 0.2
_PATH_INPUTS = (": bandwidth", ": round trip")
"""Endings of the planner's inputs that are axes of the map."""


@dataclass(frozen=True, slots=True)
class Mover:
    """A change, and where the crossover goes."""

    what: str
    """The change, for people."""
    crossover: Crossover
    ratio: float
    """New crossover over the old one, never NaN: 0 when it pays now and never did, or at any
    bandwidth; inf when it no longer pays."""


def movers(plans: PathPlans, path: TcpPath, base: Crossover) -> list[Mover]:
    """Changes and the crossover at a round trip and loss, the largest reduction first."""
    found = []
    for what, other in (*_transports(plans), *_inputs(plans)):
        moved = at(other, path)
        found.append(Mover(what, moved, _ratio(moved.bits_per_s, base.bits_per_s)))
    return sorted(found, key=lambda mover: mover.ratio)


def at(plans: PathPlans, path: TcpPath) -> Crossover:
    """Crossover at the round trip and loss of a path."""
    return crossover(lambda bits_per_s: plans.gain(replace(path, bits_per_s=bits_per_s)))


def _ratio(moved: float, base: float) -> float:
    if moved == base:
        return 1.0
    if base == 0:
        return math.inf
    return 0.0 if math.isinf(base) else moved / base


def _transports(plans: PathPlans) -> Iterator[tuple[str, PathPlans]]:
    transport = plans.transport
    nodes = transport.num_nodes or sum(
        c.num_hosts if c.transport is None else c.transport.num_nodes for c in plans.problem.prfaas
    )
    others = [c for c in CongestionControl if c is not transport.control]
    changed = [
        (f"{c} in place of {transport.control}", replace(transport, control=c)) for c in others
    ]
    changed += [
        (
            "TCP buffers of 64 MiB in place of 4 (tcp_wmem, tcp_rmem)",
            replace(transport, window_bytes=16 * transport.window_bytes),
        )
    ]
    if transport.num_nodes or len(plans.problem.prfaas) == 1:
        changed.append(("twice as many pool nodes", replace(transport, num_nodes=2 * nodes)))
    for what, other in changed:
        yield what, replace(plans, transport=other)


def _inputs(plans: PathPlans) -> Iterator[tuple[str, PathPlans]]:
    problem = plans.problem
    yield "KV cache half as large (fp8 in place of bf16)", _with(plans, _half_cache(problem))
    if any(cluster.link.price_per_tb for cluster in problem.prfaas):
        yield "traffic for nothing", _with(plans, _free_traffic(problem))
    swung: list[tuple[str, Callable[[float], Problem]]] = list(sensitivity.inputs(problem))
    for what, change in swung:
        if not what.endswith(_PATH_INPUTS):
            for sign, factor in (("-", 1 - SWING), ("+", 1 + SWING)):
                yield f"{what} {sign}{SWING:.0%}", _with(plans, change(factor))


def _with(plans: PathPlans, problem: Problem) -> PathPlans:
    return replace(plans, problem=problem)


def _free_traffic(problem: Problem) -> Problem:
    clusters = (replace(c, link=replace(c.link, price_per_tb=0.0)) for c in problem.prfaas)
    return replace(problem, prfaas=tuple(clusters))


def _half_cache(problem: Problem) -> Problem:
    return replace(problem, geometry=sensitivity.scaled_geometry(problem.geometry, 0.5))
