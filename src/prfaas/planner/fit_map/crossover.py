"""Crossover: the bandwidth at which prefill-as-a-service begins to pay, and what moves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prfaas import units as w
from prfaas.core.transfer.tcp_goodput import CongestionControl, TcpPath
from prfaas.planner.fit_map.point import PathPlans
from prfaas.planner.problem import Problem
from prfaas.planner.solve import sensitivity

LEAST_BITS_PER_S, MOST_BITS_PER_S = 1e6, 1e13
TOLERANCE = 0.01
"""Width at which the bisection stops, as a share of the bandwidth."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """Bandwidth above which the gain at equal cost is positive.

    Args:
        bits_per_s: Bandwidth; 0 when it pays at any, inf when at none.
    """

    bits_per_s: float

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
    """A change, and where the crossover goes.

    Args:
        what: The change, for people.
        ratio: New crossover over the old one, never NaN: 0 when it pays now and never did, or at
            any bandwidth; inf when it no longer pays.
    """

    what: str
    crossover: Crossover
    ratio: float


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
        ),
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
