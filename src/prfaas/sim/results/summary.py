"""Results of a run: latencies, goodput, traffic, utilisation, decisions, tenants, cost.

Names as in AIPerf.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import compress, permutations
from typing import Any

import numpy as np

from prfaas.core.control.role_loop import Role
from prfaas.core.request.events import Outcome
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.sim.engine.role_changes import as_dict as change_as_dict
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.resources.shared_link import Purpose, SharedLink
from prfaas.sim.resources.transport import Transport
from prfaas.sim.results.columns import (
    Columns,
    FinishedRequests,
    by_percentile,
    columns_of,
    have_finished,
    means,
    parts_of,
    spread,
)
from prfaas.sim.system.request import UNSET, Request
from prfaas.units import BITS_PER_BYTE, BYTES_PER_TB, NS_PER_MS, NS_PER_S


@dataclass(frozen=True, slots=True)
class Traffic:
    """Links of one PrfaaS cluster to the PD cluster, or those between the hosts of one cluster."""

    network: str
    """Name of the PrfaaS cluster, or "hosts of" and a cluster."""
    bytes_by_purpose: dict[str, float]
    """Bytes that left, lost ones included."""
    price_by_purpose: dict[str, float]
    """Their price, in the plan's currency."""
    utilisation: float
    """Share of the time in which the busiest link had bytes to send."""


def traffic_of(sim: Simulation) -> list[Traffic]:
    """The traffic of every network."""
    found = []
    for name, transports in networks(sim).items():
        price = transports[0].setup.price_per_tb / BYTES_PER_TB
        sent = dict.fromkeys((purpose.value for purpose in Purpose), 0.0)
        for transport in transports:
            for purpose, count in transport.link.sent_by_purpose().items():
                sent[purpose.value] += count
        prices = {purpose: count * price for purpose, count in sent.items()}
        busy_ns = max(transport.link.busy_ns for transport in transports)
        found.append(Traffic(name, sent, prices, busy_ns / max(sim.clock.now_ns, 1)))
    return found


def networks(sim: Simulation) -> dict[str, list[Transport]]:
    """Links of each PrfaaS cluster to the PD cluster, and between the hosts of each cluster."""
    found = dict(sim.wans)
    for cluster, pools in sim.setup.pools_of.items():
        if len(pools) > 1:
            within = permutations(pools, 2)
            found[f"hosts of {cluster}"] = [sim.transports[ends] for ends in within]
    return found


def window_bytes(links: Iterable[SharedLink]) -> dict[int, float]:
    """Bytes that left over links, by windows of one second."""
    total: dict[int, float] = {}
    for link in links:
        for window, count in link.window_bytes.items():
            total[window] = total.get(window, 0.0) + count
    return total


def by_tenant(
    sim: Simulation, arrived: Iterable[Request], good: Iterable[Request]
) -> dict[str, dict[str, float]]:
    """Requests that arrived, were admitted and met every target, and prefill that was admitted, s.

    Args:
        good: Those of them that met every target.
    """
    of_tenant: dict[str, list[Request]] = {}
    for request in arrived:
        of_tenant.setdefault(request.tenant, []).append(request)
    num_good = Counter(request.tenant for request in good)
    return {name: _row(sim, of_tenant[name], num_good[name]) for name in sorted(of_tenant)}


def _row(sim: Simulation, arrived: list[Request], num_good: int) -> dict[str, float]:
    let_in = [r for r in arrived if r.outcome is not Outcome.REJECTED]
    prefill_ns = sim.setup.costs.local_prefill_ns
    return {
        "arrived": len(arrived),
        "let_in": len(let_in),
        "good": num_good,
        "prefill_s": sum(prefill_ns(r.num_new_tokens, r.num_hit_tokens) / NS_PER_S for r in let_in),
    }


def jain_index(shares: list[float]) -> float:
    """Jain's index of fairness: 1 when all shares are equal, 1/n when one of n has everything."""
    squares = sum(share**2 for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


_S_PER_H = 3600


@dataclass(frozen=True)
class Results:
    """Figures of one run, over the requests that arrived in the measured window."""

    window_s: float
    """Length of the window, s."""
    num_requests: int
    good_request_count: int
    """Those of them that met every target."""
    outcomes: dict[str, int]
    request_throughput: float
    """First tokens in the window, 1/s."""
    goodput: float
    """Requests that arrived in the window and met every target, 1/s."""
    slo_attainment: float
    """Share of the arrivals that met every target."""
    output_token_throughput: float
    """Output tokens of these requests per second of the window."""
    time_to_first_token: dict[str, float]
    """Mean, percentiles, least, most and standard deviation, ms."""
    time_to_second_token: dict[str, float]
    """The same of those whose first token the engine that prefilled gave."""
    inter_token_latency: dict[str, float]
    """The same of the mean time per output token, ms."""
    request_latency: dict[str, float]
    """The same of the whole request, ms."""
    input_sequence_length: dict[str, float]
    """The same of the prompts, tokens."""
    output_sequence_length: dict[str, float]
    ttft_parts: dict[str, float]
    """Mean of each part of TTFT, ms; see `ttft_parts`."""
    ttft_parts_by_percentile: dict[str, dict[str, float]]
    """The same over ranges of percentiles of TTFT."""
    offloaded_ratio: float
    """Share of requests sent to the PrfaaS cluster."""
    prefix_hit_ratio: float
    """Share of the prompt tokens of started prefills that were cached there."""
    egress: dict[str, float]
    """Mean and P99 of one-second windows over all links, bit/s, and all bytes."""
    utilisation: dict[str, float]
    """Share of the time each stage worked; of links the busiest one."""
    queues: dict[str, dict[str, float]]
    """Mean, percentiles, least and most of each stage's queue while the run lasted: ms of work
    before a prefill instance, bytes before the link, requests before decode."""
    decisions: dict[str, int]
    num_recomputed: int
    """Prompts that an instance that decodes computed, in whole or in part, since what it waited for
    was lost or late."""
    num_touched: int
    """Requests that left their route in any way."""
    fallbacks: dict[str, int]
    """How often a route was left or did not pay off, by "stage/reason"."""
    retries: dict[str, int]
    """Decode legs that ran again ("made"), or might not ("over_budget")."""
    breakers_opened: dict[str, int]
    """How often the breaker of an instance or a link opened."""
    role_changes: list[dict[str, Any]]
    """Role changes: PD instance, begin, end, and new role."""
    tenants: dict[str, dict[str, float]]
    """By name: requests that arrived, were admitted and met every target, and seconds of prefill
    that were admitted, as PD-P instances take them."""
    jain_index: float
    """Of those seconds for each tenant's weight: 1 is even, 1/n is all to one of n."""
    traffic: dict[str, dict[str, dict[str, float]]]
    """Of each network: bytes and price by purpose."""
    price: dict[str, float]
    """GPUs and traffic for the run, and for one million prompt tokens; with prices, the prefills by
    use, and for one request in time."""
    num_events: int
    simulated_s: float
    digest: str
    ttft_ms: FloatArray = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)
    """Time to first token of each request that finished, ms."""

    def as_dict(self) -> dict[str, Any]:
        """Values for JSON; single requests are left out."""
        found = asdict(self)
        del found["ttft_ms"]
        return found


def summarise(
    sim: Simulation, *, start_ns: int, end_ns: int, columns: Columns | None = None
) -> Results:
    """Figures of a run.

    Args:
        start_ns: Start of the measured window.
        end_ns: Its end; arrivals in [start, end) count.
        columns: Of its requests, if they were read already.
    """
    columns = columns_of(sim.requests) if columns is None else columns
    first, came = columns["first_token_at_ns"], columns["arrived_at_ns"]
    in_window = (came >= start_ns) & (came < end_ns)
    is_done = in_window & have_finished(sim.requests)
    arrived, done = list(compress(sim.requests, in_window)), columns.chosen(is_done)
    finished = FinishedRequests(done)
    window_s = (end_ns - start_ns) / NS_PER_S
    streamed = int(((first >= start_ns) & (first < end_ns)).sum())
    is_good = finished.good(sim.setup.slo)
    good = int(is_good.sum())
    decided = [r for r in arrived if r.decision is not None]
    started = columns.chosen(in_window & (columns["prefill_started_at_ns"] != UNSET))
    num_cached, num_tokens = (
        int(started[name].sum()) for name in ("num_hit_tokens", "num_prompt_tokens")
    )
    tenants = by_tenant(sim, arrived, compress(compress(sim.requests, is_done), is_good))
    parts = parts_of(done)
    return Results(
        window_s=window_s,
        num_requests=len(arrived),
        good_request_count=good,
        outcomes=_counted(r.outcome for r in arrived),
        request_throughput=streamed / window_s,
        goodput=good / window_s,
        slo_attainment=good / len(arrived) if arrived else 0.0,
        output_token_throughput=int(done["num_output_tokens"].sum()) / window_s,
        time_to_first_token=spread(finished.ttft_ns / NS_PER_MS),
        time_to_second_token=spread(finished.ttst_ns / NS_PER_MS),
        inter_token_latency=spread(finished.tpot_ns[finished.has_steps] / NS_PER_MS),
        request_latency=spread(finished.latency_ns / NS_PER_MS),
        input_sequence_length=spread(done["num_prompt_tokens"]),
        output_sequence_length=spread(done["num_output_tokens"]),
        ttft_parts=means(parts),
        ttft_parts_by_percentile=by_percentile(parts),
        offloaded_ratio=sum(r.offloaded for r in decided) / max(len(decided), 1),
        prefix_hit_ratio=num_cached / max(num_tokens, 1),
        egress=_egress(sim, start_ns, end_ns),
        utilisation=_utilisation(sim),
        queues=_queues(sim),
        decisions=_counted(r.decision.reason for r in decided if r.decision),
        num_recomputed=sim.reactions.num_recomputed,
        num_touched=len(sim.reactions.touched),
        fallbacks=dict(sorted(sim.reactions.fallbacks.items())),
        retries=dict(sorted(sim.reactions.retries.items())),
        breakers_opened=dict(sorted(sim.reactions.opened.items())),
        tenants=tenants,
        jain_index=jain_index(
            [t["prefill_s"] / sim.setup.routing.weights.get(n, 1.0) for n, t in tenants.items()]
        ),
        role_changes=[change_as_dict(change) for change in sim.roles.changes],
        traffic={
            t.network: {"bytes": t.bytes_by_purpose, "price": t.price_by_purpose}
            for t in traffic_of(sim)
        },
        price=_price(sim, columns, good / max(len(arrived), 1)),
        num_events=sim.clock.num_events,
        simulated_s=sim.clock.now_ns / NS_PER_S,
        digest=digest(sim, columns),
        ttft_ms=finished.ttft_ns / NS_PER_MS,
    )


def _counted(labels: Iterable[StrEnum]) -> dict[str, int]:
    return {label.value: count for label, count in sorted(Counter(labels).items())}


_TIMES = (
    "prefill_started_at_ns",
    "prefilled_at_ns",
    "landed_at_ns",
    "first_token_at_ns",
    "finished_at_ns",
)


def digest(sim: Simulation, columns: Columns | None = None) -> str:
    """SHA-256 over what happened to every request."""
    columns = columns_of(sim.requests) if columns is None else columns
    trace = hashlib.sha256()
    for name in ("index", "attempt", *_TIMES):
        trace.update(columns[name].astype("<i8").tobytes())
    reasons = [r.decision.reason if r.decision else "" for r in sim.requests]
    for labels in ([r.outcome for r in sim.requests], reasons):
        trace.update("\n".join(labels).encode())
    return trace.hexdigest()


def _queues(sim: Simulation) -> dict[str, dict[str, float]]:
    samples = sim.series.samples
    return {
        "pd_prefill_ms": spread([s.local_wait_ns / NS_PER_MS for s in samples]),
        "prfaas_prefill_ms": spread([s.remote_wait_ns / NS_PER_MS for s in samples]),
        "link_bytes": spread([s.link_backlog_bytes for s in samples]),
        "decode_requests": spread([s.num_decode_waiting for s in samples]),
    }


def _egress(sim: Simulation, start_ns: int, end_ns: int) -> dict[str, float]:
    windows = range(start_ns // NS_PER_S, max(end_ns // NS_PER_S, start_ns // NS_PER_S + 1))
    by_window = window_bytes(sim.links)
    sent = np.array([by_window.get(w, 0.0) for w in windows]) * BITS_PER_BYTE
    return {
        "avg_bits_per_s": float(sent.mean()),
        "p99_bits_per_s": float(np.percentile(sent, 99)),
        "total_bytes": sum(link.sent_bytes for link in sim.links),
    }


def _utilisation(sim: Simulation) -> dict[str, float]:
    now = max(sim.clock.now_ns, 1)
    prefill_ns = sim.roles.time_ns(Role.PREFILL)
    slots_ns = sim.roles.time_ns(Role.DECODE) * sim.setup.decode.batch_max
    return {
        "pd_prefill": _busy(sum(i.busy_ns for i in sim.locals.values()), prefill_ns),
        "prfaas_prefill": _busy(
            sum(i.busy_ns for i in sim.remotes.values()), len(sim.remotes) * now
        ),
        "link": max((t.utilisation for t in traffic_of(sim)), default=0.0),
        "decode_slots": _busy(sum(d.batch_ns for d in sim.decoders.values()), slots_ns),
    }


def _busy(busy_ns: float, time_ns: float) -> float:
    return busy_ns / time_ns if time_ns else 0.0


def _price(sim: Simulation, columns: Columns, attainment: float) -> dict[str, float]:
    market = sim.front.dispatcher.market
    spent = 0.0 if market is None else market.spent
    hours = sim.clock.now_ns / NS_PER_S / _S_PER_H
    gpus = hours * sim.setup.price_per_h
    traffic = sum(sum(t.price_by_purpose.values()) for t in traffic_of(sim))
    streamed = columns["first_token_at_ns"] != UNSET
    tokens = int(columns["num_prompt_tokens"][streamed].sum())
    return {
        "gpus": gpus,
        "traffic": traffic,
        "per_million_prompt_tokens": (gpus + traffic) / max(tokens, 1) * 1e6,
        "prefills": spent,
        "per_request_in_time": spent / max(len(sim.requests) * attainment, 1.0),
    }
