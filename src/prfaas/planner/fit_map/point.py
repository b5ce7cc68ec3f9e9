"""One point of the map: the plan on a path, its gain, and the basis of the gain.

A point *pays* or *does not pay* when its gain at equal cost, with exact expectations, is further
from zero than the planner's own error and everything it rests on was measured. All others are *not
yet proven*; `Doubt` lists why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from prfaas.core.transfer.tcp_goodput import (
    MEASURED,
    Path,
    Transport,
    goodput_bits_per_s,
    most_bits_per_s,
)
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.problem import PrfaasCluster, Problem
from prfaas.planner.sizing.confidence import load_variation
from prfaas.planner.sizing.obstacles import doubt
from prfaas.planner.solve import designs
from prfaas.planner.solve.designs import Design, gain_at_equal_cost
from prfaas.planner.solve.throughput import Mode

PLANNER_ERROR = 0.07
"""Gains closer to zero are within the planner's error, the largest difference to the simulator in
docs/results/fit.md."""
EXTRAPOLATED_MAX = 0.05
"""Share of the prefill time that prompts longer than any measured one may have."""
HOST_GPUS = 8
"""GPUs of a host; each host of a PrfaaS cluster runs a pool node, unless the number is given."""


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
    """A point of the map.

    Args:
        path: Bandwidth, round trip and loss.
        goodput_bits_per_s: What TCP carries of the bandwidth.
        gain: At equal cost; inf where only the homogeneous fleet fails.
        fit: The answer.
        doubt: Why it is not yet proven, or None.
        reason: The same with figures, for people; "" where it is proven.
    """

    path: Path
    goodput_bits_per_s: float
    gain: float
    fit: Fit
    doubt: Doubt | None = None
    reason: str = ""


@dataclass(frozen=True)
class PathPlans:
    """Plans of one problem on any path.

    Several PrfaaS clusters have the round trip and loss of the path each, and keep their shares of
    the bandwidth.

    Args:
        problem: The question; its links count only as shares of the bandwidth.
        transport: Both ends; `num_nodes` 0 is one pool node for each host of a PrfaaS cluster.
        demand_per_s: Demand, req/s, or None.
    """

    problem: Problem
    transport: Transport
    demand_per_s: float | None = None

    @cached_property
    def _extrapolated(self) -> float:
        """Largest share of the prefill time beyond the knots, of any cluster."""
        return max(_beyond_knots(p, self.problem) for p in self.problem.prefill_profiles)

    @cached_property
    def _known(self) -> dict[tuple[tuple[float, ...], float], tuple[Design, Design, float]]:
        return {}

    def gain(self, path: Path) -> float:
        """Gain at equal cost on a path."""
        return self._designs(self._goodputs(path), path.rtt_s)[2]

    def best_gain(self, path: Path) -> float:
        """Gain if the path, or all send buffers, were full."""
        shares = zip(self.problem.prfaas, self._bandwidths(path), strict=True)
        most = tuple(
            most_bits_per_s(replace(path, bits_per_s=share), self._transport(cluster))
            for cluster, share in shares
        )
        return self._designs(most, path.rtt_s)[2]

    def point(self, path: Path) -> Point:
        """Plan on a path, and judge the gain."""
        goodputs = self._goodputs(path)
        ours, other, gain = self._designs(goodputs, path.rtt_s)
        carried = self.demand_per_s is None or self.demand_per_s <= ours.operation.rate_per_s
        fit = Fit.PAYS if gain > 0 and carried else Fit.DOES_NOT_PAY
        doubted, reason = self._doubt(path, ours, other, gain) if carried else (None, "")
        if doubted is not None:
            fit = Fit.NOT_PROVEN
        return Point(path, sum(goodputs), gain, fit, doubted, reason)

    def _doubt(
        self, path: Path, ours: Design, other: Design, gain: float
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
        late = doubt(self._on(self._goodputs(path), path.rtt_s), ours, other)
        return (Doubt.LATENCY, late) if late else (None, "")

    def _designs(self, goodputs: tuple[float, ...], rtt_s: float) -> tuple[Design, Design, float]:
        key = (goodputs, rtt_s)
        if key not in self._known:
            problem = self._on(goodputs, rtt_s)
            ours = designs.prfaas_pd(problem, Mode.EXACT)
            other = designs.equal_cost(problem, Mode.EXACT, ours.price_per_h)
            self._known[key] = ours, other, gain_at_equal_cost(ours, other)
        return self._known[key]

    def _on(self, goodputs: tuple[float, ...], rtt_s: float) -> Problem:
        clusters = tuple(
            replace(c, link=replace(c.link, bits_per_s=max(goodput, 1.0), rtt_s=rtt_s))
            for c, goodput in zip(self.problem.prfaas, goodputs, strict=True)
        )
        return replace(self.problem, prfaas=clusters)

    def _bandwidths(self, path: Path) -> tuple[float, ...]:
        total = sum(c.link.bits_per_s for c in self.problem.prfaas)
        return tuple(path.bits_per_s * c.link.bits_per_s / total for c in self.problem.prfaas)

    def _goodputs(self, path: Path) -> tuple[float, ...]:
        shares = zip(self.problem.prfaas, self._bandwidths(path), strict=True)
        return tuple(
            goodput_bits_per_s(replace(path, bits_per_s=share), self._transport(cluster))
            for cluster, share in shares
        )

    def _transport(self, cluster: PrfaasCluster) -> Transport:
        nodes = self.transport.num_nodes or num_hosts(cluster)
        return replace(self.transport, num_nodes=nodes)

    def _gaps(self, path: Path, egress_bits_per_s: float) -> list[str]:
        nodes = sum(self._transport(cluster).num_nodes for cluster in self.problem.prfaas)
        return MEASURED.gaps(path, replace(self.transport, num_nodes=nodes), egress_bits_per_s)


def num_hosts(cluster: PrfaasCluster) -> int:
    """Hosts of a cluster, at least 1."""
    return max(1, -(-cluster.num_instances * cluster.gpus_per_instance // HOST_GPUS))


def _beyond_knots(profile: PrefillProfile, problem: Problem) -> float:
    """Share of the prefill time that prompts above the last knot have."""
    tokens, weight = problem.workload.lengths.sample()
    load = profile.at(tokens) * weight
    return float(np.sum(load[tokens > profile.lengths[-1] * 1.01]) / np.sum(load))
