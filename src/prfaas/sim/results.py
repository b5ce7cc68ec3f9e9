"""What a run says: latencies, goodput, egress, use, decisions, cost. Names as AIPerf's."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prfaas.planner.geometry import FloatArray
from prfaas.sim.request import UNSET, Outcome, Request
from prfaas.sim.setup import SloSetup
from prfaas.sim.simulation import Simulation
from prfaas.units import NS_PER_S

BITS_PER_BYTE = 8
_PERCENTILES = (50, 75, 90, 95, 99)
_NS_PER_MS = 1e6
_BYTES_PER_TB = 1e12
_S_PER_H = 3600


@dataclass(frozen=True)
class Results:
    """Figures of one run, over the requests that arrived in the measured window.

    Attributes:
        window_s: Length of the window, s.
        num_requests: Requests that arrived in it.
        outcomes: How they ended.
        request_throughput: First tokens in the window, 1/s.
        goodput: Requests that arrived in the window and met every target, 1/s.
        slo_attainment: Share of the arrivals that met every target.
        time_to_first_token: Mean and percentiles, ms.
        inter_token_latency: The same of the mean time per output token, ms.
        request_latency: The same of the whole request, ms.
        ttft_parts: Mean of each part of TTFT, ms: queue, prefill, transfer, decode admission.
        offloaded_ratio: Share of requests sent to the PrfaaS cluster.
        prefix_hit_ratio: Share of prompt tokens that were cached where they were prefilled.
        egress: Mean and P99 of one-second windows, bit/s, and all bytes.
        utilisation: Share of the time each stage worked.
        decisions: Requests by reason.
        num_recomputed: Prefills that were lost and done again.
        price: GPUs and traffic for the run, and for one million prompt tokens.
        digest: Of the whole trace of the run.
    """

    window_s: float
    num_requests: int
    outcomes: dict[str, int]
    request_throughput: float
    goodput: float
    slo_attainment: float
    time_to_first_token: dict[str, float]
    inter_token_latency: dict[str, float]
    request_latency: dict[str, float]
    ttft_parts: dict[str, float]
    offloaded_ratio: float
    prefix_hit_ratio: float
    egress: dict[str, float]
    utilisation: dict[str, float]
    decisions: dict[str, int]
    num_recomputed: int
    price: dict[str, float]
    num_events: int
    simulated_s: float
    digest: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(sim: Simulation, *, start_ns: int, end_ns: int) -> Results:
    """Figures of a run.

    Args:
        sim: It has ended.
        start_ns: Start of the measured window.
        end_ns: Its end; arrivals in [start, end) count.
    """
    arrived = [r for r in sim.requests if start_ns <= r.arrived_at_ns < end_ns]
    done = [r for r in arrived if r.outcome is Outcome.FINISHED]
    window_s = (end_ns - start_ns) / NS_PER_S
    streamed = sum(start_ns <= r.first_token_at_ns < end_ns for r in sim.requests)
    good = sum(is_good(r, sim.setup.slo) for r in done)
    decided = [r for r in arrived if r.decision is not None]
    tokens = sum(r.num_prompt_tokens for r in decided)
    return Results(
        window_s=window_s,
        num_requests=len(arrived),
        outcomes=dict(sorted(Counter(r.outcome.value for r in arrived).items())),
        request_throughput=streamed / window_s,
        goodput=good / window_s,
        slo_attainment=good / len(arrived) if arrived else 0.0,
        time_to_first_token=_spread([r.ttft_ns / _NS_PER_MS for r in done]),
        inter_token_latency=_spread([r.tpot_ns / _NS_PER_MS for r in done]),
        request_latency=_spread([(r.finished_at_ns - r.arrived_at_ns) / _NS_PER_MS for r in done]),
        ttft_parts=_parts(done),
        offloaded_ratio=sum(r.offloaded for r in decided) / max(len(decided), 1),
        prefix_hit_ratio=sum(r.num_hit_tokens for r in decided) / max(tokens, 1),
        egress=_egress(sim, start_ns, end_ns),
        utilisation=_utilisation(sim),
        decisions=dict(
            sorted(Counter(r.decision.reason.value for r in decided if r.decision).items())
        ),
        num_recomputed=sim.num_recomputed,
        price=_price(sim),
        num_events=sim.clock.num_events,
        simulated_s=sim.clock.now_ns / NS_PER_S,
        digest=digest(sim),
    )


def is_good(request: Request, slo: SloSetup) -> bool:
    """Whether a finished request met every target."""
    in_time = slo.ttft_ns is None or request.ttft_ns <= slo.ttft_ns
    return in_time and (slo.tpot_ns is None or request.tpot_ns <= slo.tpot_ns)


def digest(sim: Simulation) -> str:
    """SHA-256 over what happened to every request."""
    trace = hashlib.sha256()
    for r in sim.requests:
        reason = r.decision.reason.value if r.decision else ""
        line = (
            f"{r.index} {r.outcome} {reason} {r.attempt} {r.prefill_started_at_ns} "
            f"{r.prefilled_at_ns} {r.landed_at_ns} {r.first_token_at_ns} {r.finished_at_ns}\n"
        )
        trace.update(line.encode())
    return trace.hexdigest()


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found: FloatArray = np.percentile(np.array(values), _PERCENTILES)
    return {
        "avg": float(np.mean(values)),
        **{f"p{p}": float(v) for p, v in zip(_PERCENTILES, found, strict=True)},
        "max": max(values),
    }


def _parts(done: list[Request]) -> dict[str, float]:
    """Parts of TTFT of requests that were prefilled once."""
    once = [r for r in done if r.attempt == 1]
    if not once:
        return {}
    instants = np.array(
        [
            (
                r.arrived_at_ns,
                r.prefill_started_at_ns,
                r.prefilled_at_ns,
                r.landed_at_ns,
                r.first_token_at_ns,
            )
            for r in once
        ],
        dtype=np.float64,
    )
    means = np.diff(instants, axis=1).mean(axis=0) / _NS_PER_MS
    names = ("queue", "prefill", "transfer", "decode_admission")
    return dict(zip(names, means.tolist(), strict=True))


def _egress(sim: Simulation, start_ns: int, end_ns: int) -> dict[str, float]:
    windows = range(start_ns // NS_PER_S, max(end_ns // NS_PER_S, start_ns // NS_PER_S + 1))
    sent = np.array([sim.link.window_bytes.get(w, 0.0) for w in windows]) * BITS_PER_BYTE
    return {
        "avg_bits_per_s": float(sent.mean()),
        "p99_bits_per_s": float(np.percentile(sent, 99)),
        "total_bytes": sim.link.sent_bytes,
    }


def _utilisation(sim: Simulation) -> dict[str, float]:
    now = max(sim.clock.now_ns, 1)
    slots = len(sim.decoders) * sim.setup.decode.batch_max
    return {
        "pd_prefill": _busy(sum(i.busy_ns for i in sim.locals.values()), len(sim.locals), now),
        "prfaas_prefill": _busy(
            sum(i.busy_ns for i in sim.remotes.values()), len(sim.remotes), now
        ),
        "link": sim.link.busy_ns / now,
        "decode_slots": _busy(sum(d.batch_ns for d in sim.decoders.values()), slots, now),
    }


def _busy(busy_ns: float, count: int, now_ns: int) -> float:
    return busy_ns / (count * now_ns) if count else 0.0


def _price(sim: Simulation) -> dict[str, float]:
    hours = sim.clock.now_ns / NS_PER_S / _S_PER_H
    gpus = hours * sim.setup.price_per_h
    traffic = sim.link.sent_bytes / _BYTES_PER_TB * sim.setup.link.price_per_tb
    tokens = sum(r.num_prompt_tokens for r in sim.requests if r.first_token_at_ns != UNSET)
    return {
        "gpus": gpus,
        "traffic": traffic,
        "per_million_prompt_tokens": (gpus + traffic) / max(tokens, 1) * 1e6,
    }
