"""Small changes of the question: shadow values, break-even points, and the tornado."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from prfaas.planner.model.kv_geometry import KvGeometry, kv_bytes_at
from prfaas.planner.problem import PlannedLink, PrfaasCluster, Problem, Workload
from prfaas.planner.solve import designs
from prfaas.planner.solve.latency import best_operation
from prfaas.planner.solve.throughput import BITS, StageMode
from prfaas.planner.workload import LogNormalLengths

Change = Callable[[float], Problem]

SHADOW_BITS_PER_S = 10e9
SHADOW_HIT_RATIO = 0.10
SWING = 0.20


@dataclass(frozen=True, slots=True)
class ShadowValue:
    """Gain of Λ from one more unit of a resource, settings re-optimised."""

    what: str
    """The unit, for people."""
    rate_gain_per_s: float


@dataclass(frozen=True, slots=True)
class GainSwing:
    """Gain at equal cost when one input is lower and higher."""

    what: str
    """The input, for people."""
    low: float
    """Gain with the input lower."""
    high: float
    """Gain with the input higher."""

    @property
    def width(self) -> float:
        """Width of the swing of the gain."""
        return abs(self.high - self.low)


@dataclass(frozen=True, slots=True)
class BreakEvenPrice:
    """Price of traffic at which PrfaaS-PD stops paying."""

    per_tb: float | None
    """Price of 10**12 bytes, 0 or more; None when there is none."""
    reason: str
    """Reason why there is none, or ""."""


def shadow_values(problem: Problem, mode: StageMode, base_rate_per_s: float) -> list[ShadowValue]:
    """ΔΛ for one more instance of each kind, 10 Gbit/s of each link, 10 % more cache hits."""
    changed: list[tuple[str, Problem]] = []
    for i, cluster in enumerate(problem.prfaas):
        more = replace(cluster, num_instances=cluster.num_instances + 1)
        changed.append((f"one more instance in {cluster.name}", problem.with_cluster(i, more)))
        link = replace(cluster.link, bits_per_s=cluster.link.bits_per_s + SHADOW_BITS_PER_S)
        faster = problem.with_cluster(i, replace(cluster, link=link))
        changed.append((f"10 Gbit/s more from {cluster.name}", faster))
    pd = replace(problem.pd, num_instances=problem.pd.num_instances + 1)
    changed.append((f"one more instance in {problem.pd.name}", replace(problem, pd=pd)))
    hits = problem.workload.with_more_hits(SHADOW_HIT_RATIO)
    changed.append(("10 % more cache hits", with_workload(problem, hits)))
    return [
        ShadowValue(what, best_operation(other, mode).rate_per_s - base_rate_per_s)
        for what, other in changed
    ]


def with_workload(problem: Problem, workload: Workload) -> Problem:
    """The problem with other traffic; profiles are continued where its lengths leave the knots."""
    clusters = tuple(
        replace(c, prefill=replace(c.prefill, extrapolate=True)) for c in problem.prfaas
    )
    pd = replace(problem.pd, prefill=replace(problem.pd.prefill, extrapolate=True))
    return replace(problem, workload=workload, prfaas=clusters, pd=pd)


def gain(problem: Problem, mode: StageMode) -> float:
    """Gain of PrfaaS-PD over the homogeneous design at equal cost, both re-optimised."""
    ours = designs.prfaas_pd(problem, mode)
    return designs.gain_at_equal_cost(ours, designs.equal_cost(problem, mode, ours.price_per_h))


def tornado(problem: Problem, mode: StageMode, swing: float = SWING) -> list[GainSwing]:
    """Gain with every input `swing` lower and higher, widest first."""
    swings = [
        GainSwing(what, gain(change(1 - swing), mode), gain(change(1 + swing), mode))
        for what, change in inputs(problem)
    ]
    return sorted(swings, key=lambda s: -s.width)


def inputs(problem: Problem) -> Iterator[tuple[str, Change]]:
    """Every continuous input of the problem, as a function of the factor it is changed by."""
    for i, cluster in enumerate(problem.prfaas):
        yield from _cluster_inputs(problem, i, cluster)
    pd, work = problem.pd, problem.workload
    tpot = pd.tpot_max_s if problem.misses_tpot else None  # a slower step would miss a tight target
    yield (
        f"{pd.name}: prefill time",
        lambda f: replace(problem, pd=replace(pd, prefill=pd.prefill.scaled(f))),
    )
    yield (
        f"{pd.name}: decode step time",
        lambda f: replace(problem, pd=replace(pd, decode=pd.decode.scaled(f), tpot_max_s=tpot)),
    )
    yield (
        f"{pd.name}: GPU price",
        lambda f: replace(problem, pd=replace(pd, price_per_gpu_h=pd.price_per_gpu_h * f)),
    )
    capacity = pd.kv_capacity_bytes
    if capacity is not None:
        yield (
            f"{pd.name}: KV memory",
            lambda f: replace(problem, pd=replace(pd, kv_capacity_bytes=capacity * f)),
        )
    yield "prompt length", lambda f: with_workload(problem, work.with_lengths_scaled(f))
    yield (
        "output length",
        lambda f: replace(problem, workload=replace(work, output_tokens=work.output_tokens * f)),
    )
    yield "KV cache size", lambda f: replace(problem, geometry=scaled_geometry(problem.geometry, f))
    lengths = work.lengths
    if isinstance(lengths, LogNormalLengths):
        yield (
            "spread of lengths (sigma)",
            lambda f: with_workload(
                problem, replace(work, lengths=replace(lengths, sigma=lengths.sigma * f))
            ),
        )


def _cluster_inputs(
    problem: Problem, index: int, cluster: PrfaasCluster
) -> Iterator[tuple[str, Change]]:
    def changed(**fields: object) -> Problem:
        return problem.with_cluster(index, replace(cluster, **fields))  # type: ignore[arg-type]

    def linked(f: float, field: str) -> Problem:
        link: PlannedLink = replace(cluster.link, **{field: getattr(cluster.link, field) * f})
        return changed(link=link)

    yield f"{cluster.name}: prefill time", lambda f: changed(prefill=cluster.prefill.scaled(f))
    yield (
        f"{cluster.name}: GPU price",
        lambda f: changed(price_per_gpu_h=cluster.price_per_gpu_h * f),
    )
    yield f"{cluster.name}: bandwidth", lambda f: linked(f, "bits_per_s")
    if cluster.link.rtt_s:
        yield f"{cluster.name}: round trip", lambda f: linked(f, "rtt_s")
    if cluster.link.loss:
        yield f"{cluster.name}: loss", lambda f: linked(f, "loss")
    if cluster.link.price_per_tb:
        yield f"{cluster.name}: price per TB", lambda f: linked(f, "price_per_tb")


def scaled_geometry(geometry: KvGeometry, factor: float) -> KvGeometry:
    """Every layer's cache `factor` times as large, to the nearest byte."""
    groups = tuple(
        replace(
            g, token_bytes=round(g.token_bytes * factor), state_bytes=round(g.state_bytes * factor)
        )
        for g in geometry.groups
    )
    return replace(geometry, groups=groups)


def with_bandwidth(problem: Problem, factor: float) -> Problem:
    """Every link `factor` times as fast."""
    clusters = tuple(
        replace(c, link=replace(c.link, bits_per_s=c.link.bits_per_s * factor))
        for c in problem.prfaas
    )
    return replace(problem, prfaas=clusters)


def break_even_bandwidth(problem: Problem, mode: StageMode) -> float | None:
    """Bandwidth of all links together below which PrfaaS-PD loses at equal cost, bit/s.

    Returns:
        None when no bandwidth makes it pay; 0 when it pays at any.
    """
    total = sum(c.link.bits_per_s for c in problem.prfaas)
    low, high = 1e-6, 1e4
    if gain(with_bandwidth(problem, high), mode) <= 0:
        return None
    if gain(with_bandwidth(problem, low), mode) > 0:
        return 0.0
    for _ in range(30):
        middle = float(np.sqrt(low * high))
        low, high = (
            (low, middle) if gain(with_bandwidth(problem, middle), mode) > 0 else (middle, high)
        )
    return total * high


def recompute_bandwidth(problem: Problem, num_tokens: float) -> float:
    """Bandwidth at which fetching a KV cache takes as long as recomputing it on PD-P, bit/s.

    Below it, recomputing is right unless the cache is reused. It is Φ_kv of the local hardware;
    with T_prefill = 2 * parameters * l / FLOP/s it is the formula B* = KV bytes per token *
    FLOP/s / (2 * parameters).
    """
    size = float(kv_bytes_at(problem.geometry, np.array([num_tokens]))[0])
    return size * BITS / problem.pd.prefill.seconds_at(num_tokens)


def break_even_price(problem: Problem, mode: StageMode) -> BreakEvenPrice:
    """Price of 10**12 bytes, the same on every link, at which the gain at equal cost is zero.

    The baseline is bought with all the money of PrfaaS-PD, the price of its traffic included, as
    in `gain`.
    """
    ours = designs.prfaas_pd(problem, mode)
    rate = ours.operation.rate_per_s
    if rate < designs.DEAD_PER_S:
        return BreakEvenPrice(None, "none: PrfaaS-PD sustains nothing")
    shipped = designs.terabytes_per_h(ours.operation)
    if not shipped:
        return BreakEvenPrice(None, "none: nothing is shipped")
    budget = designs.instances_for(problem, mode, rate) * problem.pd.price_per_instance_h
    price = (budget - ours.gpu_price_per_h) / shipped
    if price < 0:
        return BreakEvenPrice(None, "none: it loses on a free link")
    if np.isinf(price):
        return BreakEvenPrice(None, "none: no homogeneous fleet sustains as much")
    return BreakEvenPrice(price, "")
