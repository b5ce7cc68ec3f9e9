"""Time to first token, and the best rate within a target of it.

Service time, the paper's way: a local request waits for its prefill, an offloaded one for its
prefill and then for its whole KV cache at full link speed.

Overlapped: KV of finished prefill chunks travels while the next chunk is computed, so what
remains after prefill is the last chunk's KV and the recurrent states, or, on a slow link,
whatever the link still owes. One round trip is added.

Queueing is approximate, and the simulator is the judge: every prefill stage is a GI/G/N queue
with the Allen-Cunneen mean wait and an exponential tail of that mean behind Erlang's C; the link
is a processor-sharing queue that slows transfers by 1 / (1 - utilisation). Waiting for decode
slots is left out. The P99 of the approximation is printed as a range, `P99_RANGE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from prfaas.core.codec.gain import PlannedCodedLink
from prfaas.errors import ConfigError
from prfaas.planner.model.kv_geometry import FloatArray, wire_bytes_at
from prfaas.planner.problem import Problem
from prfaas.planner.solve.search import (
    Bottleneck,
    OperatingPoint,
    SearchGrid,
    allowed_rates,
    operation,
    optimum,
    search_grid,
)
from prfaas.planner.solve.throughput import BITS, StageMode

DEFAULT_CHUNK_TOKENS = 8192  # vLLM's default prefill chunk for online serving on large GPUs

_SATURATED = 1e-9  # of a stage's servers: less slack than the rounding error is none
P99_RANGE = (0.58, 1.45)
"""Simulated P99 with queueing, as a share of the formula's: between these in random plans, which
is an error of the formula of -31 to +72 %."""


class TransferOverlap(StrEnum):
    """Overlap of transfer and prefill."""

    AFTER_PREFILL = "after prefill"
    OVERLAPPED = "overlapped"
    NOT_AWAITED = "not awaited"
    """The instance that prefills gives the first token."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Time to first token, s."""

    mean: float
    """Mean; inf when a stage is saturated."""
    p50: float
    p90: float
    """90th percentile."""
    p99: float
    """99th percentile."""

    @property
    def p99_range(self) -> tuple[float, float]:
        """Range of the P99 of a latency with queueing, s."""
        low, high = P99_RANGE
        return self.p99 * low, self.p99 * high


@dataclass(frozen=True)
class _Class:
    """Requests that go the same way."""

    service_s: FloatArray
    """TTFT without waiting, s."""
    prefill_s: FloatArray
    """Time that the prefill instance is busy, s."""
    weight: FloatArray
    """Share of all requests."""
    num_servers: int
    """Instances that serve the class."""


def service_ttft(
    problem: Problem,
    found: OperatingPoint,
    transfer: TransferOverlap = TransferOverlap.AFTER_PREFILL,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> Latency:
    """TTFT without any waiting.

    Args:
        transfer: The paper's way, or overlapped by chunks with one round trip, or not awaited.
    """
    classes = _classes(problem, found, transfer, chunk_tokens, link_load=0.0)
    return _latency([(c, 0.0, 0.0) for c in classes])


def queued_ttft(
    problem: Problem,
    found: OperatingPoint,
    arrival_per_s: float,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> Latency:
    """TTFT with queueing at an arrival rate, transfers overlapped; ConfigError if the rate is not
    above 0; returns all figures inf when a stage is saturated.

    Args:
        problem: The question; its workload gives the variation of arrivals.
    """
    if arrival_per_s <= 0:
        raise ConfigError(f"arrival rate is {arrival_per_s} req/s; it has to be above 0")
    link_load = _link_load(problem, found, arrival_per_s)
    if link_load >= 1 or arrival_per_s >= found.decode_per_s:
        return Latency(*[float("inf")] * 4)
    classes = _classes(problem, found, TransferOverlap.OVERLAPPED, chunk_tokens, link_load)
    waits = [_wait(c, arrival_per_s, problem.workload.arrival_cv) for c in classes]
    return _latency([(c, *w) for c, w in zip(classes, waits, strict=True)])


def share_in_time(
    problem: Problem, found: OperatingPoint, arrival_per_s: float, time_s: float
) -> float:
    """Share of requests that have their first token within a time, with queueing, in [0, 1].

    Args:
        problem: The question; its chunk and variation of arrivals count.
        found: Threshold and split at Λ_max, which is above 0 unless nothing arrives.
        arrival_per_s: Offered Λ, req/s; at 0 there are no waits.
    """
    link_load = _link_load(problem, found, arrival_per_s) if arrival_per_s else 0.0
    if link_load >= 1 or (arrival_per_s and arrival_per_s >= found.decode_per_s):
        return 0.0
    chunk = problem.chunk_tokens
    classes = _classes(problem, found, TransferOverlap.OVERLAPPED, chunk, link_load)
    share = 0.0
    for group in classes:
        waiting, mean_s = 0.0, 0.0
        if arrival_per_s:
            waiting, mean_s = _wait(group, arrival_per_s, problem.workload.arrival_cv)
        if not np.isinf(mean_s):
            share += _done_by(group, waiting, mean_s, time_s)
    return share


def _link_load(problem: Problem, found: OperatingPoint, arrival_per_s: float) -> float:
    capacity = sum(c.wire_bits_per_s for c in problem.prfaas) or np.inf
    scale = arrival_per_s / found.rate_per_s if found.rate_per_s else np.inf
    return found.egress_bits_per_s * scale / capacity if found.egress_bits_per_s else 0.0


def _classes(
    problem: Problem,
    found: OperatingPoint,
    transfer: TransferOverlap,
    chunk_tokens: int,
    link_load: float,
) -> list[_Class]:
    tokens, weight = problem.workload.lengths.sample()
    threshold = _threshold(problem, found)
    local, remote = tokens <= threshold, tokens > threshold
    classes = []
    if local.any():
        seconds = problem.workload.prefill_s(problem.pd.prefill, tokens[local])
        classes.append(_Class(seconds, seconds, weight[local], found.num_prefill))
    for cluster, share in zip(problem.prfaas, found.cluster_shares, strict=True):
        if not remote.any() or not share:
            continue
        prefill = problem.workload.prefill_s(cluster.prefill, tokens[remote])
        free = cluster.wire_bits_per_s * (1 - link_load)
        bits_per_s = min(free, cluster.transfer_bits_per_s)
        arrival = prefill
        if transfer is not TransferOverlap.NOT_AWAITED:
            arrival = _arrival(
                problem,
                tokens[remote],
                prefill,
                link=cluster.coded,
                bits_per_s=bits_per_s,
                transfer=transfer,
                chunk_tokens=chunk_tokens,
            )
        rtt = 0.0 if transfer is TransferOverlap.AFTER_PREFILL else cluster.link.rtt_s
        classes.append(
            _Class(arrival + rtt, prefill, weight[remote] * share, cluster.num_instances)
        )
    return classes


def _threshold(problem: Problem, found: OperatingPoint) -> float:
    if found.offload_threshold is not None:
        return found.offload_threshold
    lengths = problem.workload.lengths
    return lengths.high if found.offload_fraction == 0 else float(np.nextafter(lengths.low, 0))


def _arrival(
    problem: Problem,
    tokens: FloatArray,
    prefill_s: FloatArray,
    *,
    link: PlannedCodedLink,
    bits_per_s: float,
    transfer: TransferOverlap,
    chunk_tokens: int,
) -> FloatArray:
    """Time from the start of prefill to the last byte of the KV cache, s."""
    geometry = problem.geometry
    whole_s = wire_bytes_at(geometry, tokens, link) * BITS / bits_per_s
    if transfer is TransferOverlap.AFTER_PREFILL:
        return prefill_s + whole_s
    chunks = np.ceil(tokens / chunk_tokens)
    state_s = geometry.state_bytes / link.state_ratio(geometry.state_dtype) * BITS / bits_per_s
    last_s = (whole_s - state_s) / chunks + state_s
    fast_link, slow_link = prefill_s + last_s, prefill_s / chunks + whole_s
    return np.asarray(np.maximum(fast_link, slow_link), dtype=np.float64)


def erlang_c(num_servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/N with `offered` = λ E[S] < N.

    References:
        Erlang's C by the recursion of his B formula.
    """
    blocking = 1.0
    for n in range(1, num_servers + 1):
        blocking = offered * blocking / (n + offered * blocking)
    utilisation = offered / num_servers
    return blocking / (1 - utilisation * (1 - blocking))


def _wait(group: _Class, arrival_per_s: float, arrival_cv: float) -> tuple[float, float]:
    """Probability of waiting and mean wait of those who do, s (Allen and Cunneen 1978)."""
    share = float(group.weight.sum())
    mean = float(np.average(group.prefill_s, weights=group.weight))
    variance = float(np.average((group.prefill_s - mean) ** 2, weights=group.weight))
    rate = arrival_per_s * share
    offered = rate * mean
    if offered >= group.num_servers * (1 - _SATURATED):
        return 1.0, float("inf")
    # A thinned stream of arrivals is closer to Poisson (Whitt's QNA, splitting).
    arrival_scv = share * arrival_cv**2 + 1 - share
    waiting = erlang_c(group.num_servers, offered)
    spare = group.num_servers / mean - rate
    return waiting, (arrival_scv + variance / mean**2) / 2 / spare


def _latency(classes: list[tuple[_Class, float, float]]) -> Latency:
    if any(np.isinf(mean_wait) for _, _, mean_wait in classes):
        return Latency(*[float("inf")] * 4)
    mean = sum(float(np.sum(c.weight * (c.service_s + q * w))) for c, q, w in classes)
    p50, p90, p99 = (_quantile(classes, ratio) for ratio in (0.5, 0.9, 0.99))
    return Latency(mean, p50, p90, p99)


def _quantile(classes: list[tuple[_Class, float, float]], ratio: float) -> float:
    """Smallest time by which a share `ratio` of requests has its first token, by bisection."""
    low, high = 0.0, max(float(c.service_s.max()) + 60 * w for c, _, w in classes)
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(_done_by(c, q, w, middle) for c, q, w in classes)
        low, high = (low, middle) if reached >= ratio - 1e-12 else (middle, high)
    return high


def _done_by(group: _Class, waiting: float, mean_wait_s: float, time_s: float) -> float:
    slack = time_s - group.service_s
    late = waiting * np.exp(-np.maximum(slack, 0) / mean_wait_s) if mean_wait_s > 0 else 0.0
    return float(np.sum(group.weight * np.where(slack >= 0, 1 - late, 0.0)))


TARGET_SHARE = 0.9
_COLUMNS_MAX = 24  # thresholds that are tried with queueing
_NO_LOAD = 1e-9  # of Λ: nobody waits
_STEPS = 20


def best_operation(problem: Problem, mode: StageMode) -> OperatingPoint:
    """The settings with the highest Λ, within the problem's target if it has one."""
    grid = search_grid(problem, mode)
    if problem.ttft_p90_s is None:
        return optimum(problem, mode, grid)
    return within_target(problem, mode, grid)


def within_target(problem: Problem, mode: StageMode, grid: SearchGrid) -> OperatingPoint:
    """The point of a grid with the highest rate at which the TTFT target is met.

    Without a target, the point with the highest Λ. `Bottleneck.TTFT_TARGET` of the answer has the
    rate at which the target binds; it is 0 when the target is missed without any load.
    """
    target = problem.ttft_p90_s
    best, best_rate = optimum(problem, mode, grid), 0.0
    if target is None:
        return best
    for found in candidates(problem, mode, grid):
        if found.rate_per_s <= best_rate:
            break  # the rest sustain less even without a target
        if not meets(problem, found, max(best_rate, _NO_LOAD * found.rate_per_s)):
            continue
        best, best_rate = found, _rate_within(problem, found, best_rate)
    return bounded(best, best_rate)


def candidates(problem: Problem, mode: StageMode, grid: SearchGrid) -> Iterator[OperatingPoint]:
    """Settings that may meet the target, those with the highest Λ first."""
    rates = allowed_rates(problem, grid)
    columns = _columns(rates)
    first = int(np.argmax(rates[:, columns].max(axis=1)))
    meeting = [
        column
        for column in columns
        if meets_idle(problem, operation(problem, mode, grid, first, column))
    ]
    points = [(row, column) for row in range(len(rates)) for column in meeting]
    for row, column in sorted(points, key=lambda at: -rates[at]):
        if rates[row, column] > 0:
            yield operation(problem, mode, grid, row, column)


def _columns(rates: np.typing.NDArray[np.float64]) -> list[int]:
    """Columns spread over the thresholds, the best one and both ends included."""
    count = rates.shape[1]
    spread = np.linspace(0, count - 1, min(count, _COLUMNS_MAX)).round().astype(int)
    return sorted({*spread.tolist(), int(rates.max(axis=0).argmax())})


def meets(problem: Problem, found: OperatingPoint, rate_per_s: float) -> bool:
    """Return True if the P90 at a load is within the target."""
    assert problem.ttft_p90_s is not None  # noqa: S101 (asked with a target only)
    share = share_in_time(problem, found, rate_per_s, problem.ttft_p90_s)
    return share >= TARGET_SHARE - 1e-9


def meets_idle(problem: Problem, found: OperatingPoint) -> bool:
    """Return True if the P90 without any waiting is within the target."""
    assert problem.ttft_p90_s is not None  # noqa: S101 (asked with a target only)
    return share_in_time(problem, found, 0.0, problem.ttft_p90_s) >= TARGET_SHARE - 1e-9


def _rate_within(problem: Problem, found: OperatingPoint, met_at: float) -> float:
    low, high = met_at, found.rate_per_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(problem, found, middle) else (low, middle)
    return low


def bounded(found: OperatingPoint, rate_per_s: float) -> OperatingPoint:
    """The same settings at the rate at which the target binds, req/s."""
    share = rate_per_s / found.rate_per_s if found.rate_per_s else 0.0
    return replace(
        found,
        rate_per_s=rate_per_s,
        egress_bits_per_s=found.egress_bits_per_s * share,
        capacity_per_s={**found.capacity_per_s, Bottleneck.TTFT_TARGET: rate_per_s},
    )
