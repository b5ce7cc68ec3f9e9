"""Sentences about missed targets and demands and their cures, and about few long prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from prfaas import units as w
from prfaas.planner.model.kv_geometry import FloatArray, kv_bytes_at
from prfaas.planner.problem import Problem
from prfaas.planner.sizing.fleet import INSTANCES_MAX, Fleet, Sizing, size
from prfaas.planner.solve.designs import DEAD_PER_S, Design
from prfaas.planner.solve.latency import Latency, TransferOverlap, best_operation, service_ttft
from prfaas.planner.solve.search import Bottleneck, OperatingPoint, optimum
from prfaas.planner.solve.throughput import StageMode

REQUESTS = 16_000
"""Number of requests for the variation of a load: a long simulation, or an hour at 4 req/s."""
WANDER_MAX = 0.05
"""A load that varies by more (two standard errors) is noted."""
_NEAR = 0.2  # stages with less slack decide the result


def few_long_prompts(problem: Problem, found: OperatingPoint) -> list[str]:
    """A note for each prefill stage near its limit whose load rests on few long prompts."""
    return [
        f"{stage.value}: {_half(load, weight):.1%} of all requests, the longest, carry "
        f"half of its load, so it varies by ±{wander:.0%} over {REQUESTS:,} requests; "
        "simulate several seeds, or plan with a longer trace"
        for stage, load, weight in _near_limit(problem, found)
        if (wander := 2 * _relative_error(load, weight)) > WANDER_MAX
    ]


def noted_variation(problem: Problem, found: OperatingPoint) -> float:
    """Largest variation that `few_long_prompts` notes, two standard errors; 0 without one."""
    near = _near_limit(problem, found)
    variations = (2 * _relative_error(load, weight) for _, load, weight in near)
    return max((wander for wander in variations if wander > WANDER_MAX), default=0.0)


def rate_variation(problem: Problem, found: OperatingPoint) -> float:
    """Variation of a rate that a prefill stage limits, two standard errors as a share of it.

    0 where none is near its limit.
    """
    near = _near_limit(problem, found)
    return max((2 * _relative_error(load, weight) for _, load, weight in near), default=0.0)


def load_variation(problem: Problem, found: OperatingPoint) -> float:
    """Return the variation of all prefill work by a stage near its limit, two standard errors.

    A stage that few requests load varies much and matters little: it counts with its share of the
    work, in time of the PD cluster.
    """
    tokens, weight = problem.workload.lengths.sample()
    work = problem.workload.prefill_s(problem.pd.prefill, tokens) * weight
    return max(
        (
            2 * _relative_error(load, weight) * float(np.sum(work[load > 0]) / np.sum(work))
            for _, load, weight in _near_limit(problem, found)
        ),
        default=0.0,
    )


def _near_limit(
    problem: Problem, found: OperatingPoint
) -> Iterator[tuple[Bottleneck, FloatArray, FloatArray]]:
    """Prefill stages near their limit, with the load of each length and its weight."""
    tokens, weight = problem.workload.lengths.sample()
    high = problem.workload.lengths.high
    threshold = high if found.offload_threshold is None else found.offload_threshold
    for stages, side, profile in (
        (
            (Bottleneck.PRFAAS_COMPUTE, Bottleneck.PRFAAS_NETWORK),
            tokens > threshold,
            problem.prfaas[0].prefill if problem.prfaas else None,
        ),
        ((Bottleneck.PD_PREFILL,), tokens <= threshold, problem.pd.prefill),
    ):
        near = [s for s in stages if found.rate_per_s and found.slack(s) < _NEAR]
        if profile is None or not near or not side.any():
            continue
        yield near[0], np.where(side, profile.at(tokens), 0.0), weight


def _relative_error(load: FloatArray, weight: FloatArray) -> float:
    """Standard error of the mean load over `REQUESTS` requests, relative to the mean."""
    mean = float(np.average(load, weights=weight))
    variance = float(np.average((load - mean) ** 2, weights=weight))
    return float(np.sqrt(variance / REQUESTS) / mean)


def _half(load: FloatArray, weight: FloatArray) -> float:
    """Share of requests that carries half of the load, those with the most load first."""
    order = np.argsort(-load)
    carried = np.cumsum((load * weight)[order])
    last = int(np.searchsorted(carried, carried[-1] / 2))
    return float(weight[order][: last + 1].sum())


_FASTER = (2, 10, 100)
_LOOSER = (2, 4, 10)


def cure_of_demand(
    problem: Problem, demand_per_s: float, instances_max: int = INSTANCES_MAX
) -> str:
    """Return the changes that would carry a demand that no fleet carries, as a clause.

    One change at a time: faster links, a looser target, a threshold or split that is searched;
    the least of each that helps.

    Args:
        instances_max: Largest number of instances of a cluster that is tried.
    """
    ways = [
        words
        for words in (
            _first(_faster_links(problem), demand_per_s, instances_max),
            _first(_looser_targets(problem), demand_per_s, instances_max),
            _first(_searched(problem), demand_per_s, instances_max),
        )
        if words
    ]
    if ways:
        return f"it would take {', or '.join(ways)}"
    return "split the demand over several deployments"


def _first(changes: Iterator[tuple[str, Problem]], demand_per_s: float, instances_max: int) -> str:
    for words, changed in changes:
        if size(changed, demand_per_s, instances_max).cheapest is not None:
            return words
    return ""


def _faster_links(problem: Problem) -> Iterator[tuple[str, Problem]]:
    if not any(cluster.num_instances for cluster in problem.prfaas):
        return
    for factor in _FASTER:
        clusters = tuple(
            replace(c, link=replace(c.link, bits_per_s=c.link.bits_per_s * factor))
            for c in problem.prfaas
        )
        total = sum(c.link.bits_per_s for c in clusters)
        yield f"links of {w.bandwidth(total)} in all", replace(problem, prfaas=clusters)


def _looser_targets(problem: Problem) -> Iterator[tuple[str, Problem]]:
    if problem.ttft_p90_s is None:
        return
    for factor in _LOOSER:
        target = problem.ttft_p90_s * factor
        yield f"a TTFT P90 of {w.seconds(target)}", replace(problem, ttft_p90_s=target)


def _searched(problem: Problem) -> Iterator[tuple[str, Problem]]:
    if problem.threshold is not None:
        step = max(problem.step_tokens, round(problem.workload.lengths.high / 200))
        free = replace(problem, threshold=None, step_tokens=step)
        yield "a threshold of the planner's choice (leave search.threshold out)", free


def obstacle(
    problem: Problem, ours: Design, demand_per_s: float | None, sizing: Sizing | None
) -> str:
    """A target or demand that the plan misses, with the limiting stage and the cure; or ""."""
    found, target = ours.operation, problem.ttft_p90_s
    if problem.misses_tpot:
        return _missed_tpot(problem)
    if found.rate_per_s < DEAD_PER_S:
        untargeted = optimum(problem, StageMode.EXACT)
        if untargeted.rate_per_s < DEAD_PER_S:
            dead = untargeted.binding
            if untargeted.decode_per_s < DEAD_PER_S:
                dead = Bottleneck.PD_DECODE
            rate = f"{untargeted.rate_per_s:.2g} req/s" if untargeted.rate_per_s else "nothing"
            return f"{dead.value} sustains {rate}, whatever the target: {_cure(problem, dead)}"
        if target is not None:
            return _missed_target(problem, found, target)
    if demand_per_s is None or demand_per_s <= found.rate_per_s:
        return ""
    within = "" if target is None else f" within a TTFT P90 of {w.seconds(target)}"
    return (
        f"a demand of {demand_per_s:,.10g} req/s is above the {found.rate_per_s:.3g} req/s that it "
        f"sustains{within}; {found.binding_in_words}; "
        f"{_takes(problem, demand_per_s, sizing)}"
    )


def _missed_tpot(problem: Problem) -> str:
    """Report a missed target of decode, and of the first token where that is missed as well."""
    pd, context = problem.pd, problem.workload.mean_context
    assert pd.tpot_max_s is not None  # noqa: S101 (a missed target is given)
    _, step_s = pd.decode.largest_batch(context, pd.tpot_max_s)
    missed = (
        f"a TPOT of {pd.tpot_max_s * 1e3:.3g} ms is met at no load, threshold or size: the "
        f"smallest measured batch of {pd.name}, {pd.decode.batches[0]:,}, takes "
        f"{step_s * 1e3:.3g} ms a step at a context of {context:,.0f} tokens; decode step time "
        f"binds; it would take steps that are {w.factor_up(step_s / pd.tpot_max_s)} times as fast, "
        "or a profile with smaller batches that meet the target"
    )
    free = replace(problem, pd=replace(pd, tpot_max_s=None))
    found = best_operation(free, StageMode.EXACT)
    if free.ttft_p90_s is None or found.rate_per_s >= DEAD_PER_S:
        return missed
    return f"{missed}; also {_missed_target(free, found, free.ttft_p90_s)}"


def _missed_target(problem: Problem, found: OperatingPoint, target: float) -> str:
    ours, remote = _idle_p90(problem, found), _idle_remote_p90(problem)
    home = replace(problem, prfaas=(), threshold=None, ttft_p90_s=None)
    local = _idle_p90(home, optimum(home, StageMode.EXACT)).p90
    ways = f"prefill that is {_faster_prefill(problem, local)} times as fast in {problem.pd.name}"
    if remote is not None and remote > target:
        ways += ", or remote prefill and a link that are"
        ways += f" {remote - target:.3g} s faster in all"
    shown = "" if remote is None else f", {w.seconds(remote)} with all of them remote"
    return (
        f"a TTFT P90 of {w.seconds(target)} is met at no load, threshold or size: without waiting "
        f"it is {w.seconds(ours.p90)} at the threshold with the highest rate{shown} and "
        f"{w.seconds(local)} with none; prefill time and round trip bind; it would take {ways}"
    )


def _faster_prefill(problem: Problem, local_p90_s: float) -> str:
    """The least factor by which local prefill has to be faster to meet the target."""
    assert problem.ttft_p90_s is not None  # noqa: S101 (asked with a target only)
    low, high = 1.0, max(local_p90_s / problem.ttft_p90_s, 1.0) * 1.02
    if not _meets_with(problem, high):
        return f"more than {w.factor(high)}"
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _meets_with(problem, middle) else (middle, high)
    return w.factor(high)


def _meets_with(problem: Problem, faster: float) -> bool:
    pd = replace(problem.pd, prefill=problem.pd.prefill.scaled(1 / faster))
    return best_operation(replace(problem, pd=pd), StageMode.EXACT).rate_per_s >= DEAD_PER_S


def _idle_p90(problem: Problem, found: OperatingPoint) -> Latency:
    return service_ttft(problem, found, TransferOverlap.OVERLAPPED, problem.chunk_tokens)


def _idle_remote_p90(problem: Problem) -> float | None:
    if not any(cluster.num_instances for cluster in problem.prfaas):
        return None
    everything = Problem(
        title=problem.title,
        geometry=problem.geometry,
        workload=problem.workload,
        prfaas=problem.prfaas,
        pd=problem.pd,
        step_tokens=max(round(problem.workload.lengths.high), 1),
        threshold=problem.workload.lengths.low * (1 - 1e-12),
    )
    found = optimum(everything, StageMode.EXACT)
    return _idle_p90(problem, found).p90


def _takes(problem: Problem, demand_per_s: float, sizing: Sizing | None) -> str:
    if sizing is None:
        return f"no fleet of up to {INSTANCES_MAX:,} instances was searched"
    if sizing.cheapest is not None:
        return f"it would take {fleet_in_words(problem, sizing.cheapest)}"
    none = f"no fleet of up to {INSTANCES_MAX:,} instances of a cluster carries it"
    return f"{none}; {cure_of_demand(problem, demand_per_s)}"


def fleet_in_words(problem: Problem, fleet: Fleet) -> str:
    """Instances, settings and price of a fleet."""
    clusters = zip(problem.prfaas, fleet.prfaas, strict=True)
    parts = [f"{count} in {cluster.name}" for cluster, count in clusters if count]
    parts.append(f"{fleet.pd} in {problem.pd.name}")
    threshold = fleet.offload_threshold
    settings = "nothing offloaded" if threshold is None else f"t = {threshold:,.0f}"
    return (
        f"{' and '.join(parts)} (N_p : N_d = {fleet.num_prefill} : "
        f"{fleet.pd - fleet.num_prefill}, {settings}) for {fleet.price_per_h:,.4g} an hour"
    )


def _cure(problem: Problem, dead: Bottleneck) -> str:
    """Return the need of a stage that sustains nothing."""
    if dead is Bottleneck.PD_DECODE:
        context = problem.workload.mean_context
        size = float(kv_bytes_at(problem.geometry, np.array([context]))[0])
        return f"a sequence needs {size / 1e9:,.3g} GB of KV memory of a decode instance"
    if dead is Bottleneck.PD_PREFILL:
        kept = "" if problem.num_prefill is None else " (search.num_prefill)"
        return f"no instance{kept} is left for local prompts of {problem.pd.name}; it takes one"
    if not any(cluster.num_instances for cluster in problem.prfaas):
        return "it needs an instance for prompts above the threshold"
    total = sum(c.link.bits_per_s for c in problem.prfaas)
    chosen = "" if problem.threshold is None else ", or no search.threshold"
    return f"prompts above the threshold need faster links than {w.bandwidth(total)} in all{chosen}"


def doubt(problem: Problem, ours: Design, other: Design) -> str:
    """A gain that is bought with time to first token where no target limits it; or ""."""
    if problem.ttft_p90_s is not None or not ours.operation.rate_per_s:
        return ""
    mine = _idle_p90(problem, ours.operation).p90
    theirs = _idle_p90(problem, other.operation).p90
    if mine <= theirs:
        return ""
    return (
        f"its TTFT P90 without waiting is {w.seconds(mine)} against {w.seconds(theirs)} of the "
        "homogeneous fleet; slo.ttft_p90 decides"
    )
