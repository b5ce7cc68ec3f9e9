"""An upper bound of goodput for a scenario, from a relaxation that knows all that arrives.

Each request takes prefill time at home, or prefill time away and bytes on the link, and decode time
either way. The relaxation serves fractions of requests, in any order, with everything known in
advance. Only requests in time count: what arrives in a span is prefilled by one target after it.
No policy can do better:

    maximise    the requests that are served, home or away
    such that   decode slots taken, each for the shortest time <= slots x (window + target)
    and for the requests that arrive in any span of 5 s to 4 min, or all of the window
                prefill time at home   <= instances x (span + target)
                prefill time away      <= instances x (span + target)
                bytes on the link      <= rate x (span + target)

A request that cannot meet its target alone on an idle path does not take that path. Cached prefixes
count as in a cache without limits that already holds what came before: no policy hits more.

In a closed loop arrivals follow answers: they are those of a system in which nobody waits, which
has the most of them. That is a bound for all of a run; a window may have a request more.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import takewhile

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, hstack, identity, vstack

from prfaas.errors import ConfigError
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import Setup
from prfaas.units import BITS_PER_BYTE, NS_PER_S

SPANS_S = (5.0, 15.0, 60.0, 240.0)
"""Lengths of the spans whose arrivals must be served within the span and one target."""
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Use:
    """Seconds of each stage that serving a request takes."""

    local_s: float
    """Prefill at home; inf where that is late even alone."""
    remote_s: float
    """Prefill away; inf the same."""
    link_s: float
    decode_s: float
    alone_s: float
    """From arrival to the last token, on the faster path with nobody else."""


def bound(scenario: Scenario) -> float:
    """Upper bound of the goodput of a scenario, req/s.

    Raises:
        ConfigError: It has no TTFT target, not exactly one PrfaaS cluster, or no decode instances.
    """
    setup = scenario.setup
    if setup.slo.ttft_ns is None or len(setup.prfaas) != 1 or not setup.num_decode:
        raise ConfigError(
            "an offline bound is known for scenarios with slo.ttft, one PrfaaS cluster and decode "
            f"instances; this one has {len(setup.prfaas)} PrfaaS clusters and {setup.num_decode} "
            "decode instances" + ("" if setup.slo.ttft_ns else ", and no slo.ttft")
        )
    came = _come(scenario)
    end_ns = scenario.end_ns or max(r.arrived_at_ns for r, _ in came) + 1
    counted = [(r, use) for r, use in came if scenario.start_ns <= r.arrived_at_ns < end_ns]
    came_s = np.array([(r.arrived_at_ns - scenario.start_ns) / NS_PER_S for r, _ in counted])
    window_s = (end_ns - scenario.start_ns) / NS_PER_S
    return _served(setup, came_s, [use for _, use in counted], window_s) / window_s


def _come(scenario: Scenario) -> list[tuple[Request, Use]]:
    """Requests in order of arrival; one that follows another comes as if that had not waited.

    The hit of each is the longest prefix that any earlier request had.
    """
    setup, roots = scenario.setup, scenario.requests()
    cached, seen = setup.cache.host_blocks != 0, set[int]()
    queue = [(r.arrived_at_ns, r.index, r) for r in roots]
    heapify(queue)
    found = []
    while queue:
        at_ns, _, request = heappop(queue)
        request.arrived_at_ns = at_ns
        length = 0
        if cached:
            length = sum(1 for _ in takewhile(seen.__contains__, request.block_ids))
            seen.update(request.block_ids)
        use = _use(setup, request, min(length * setup.blocks.tokens, request.num_prompt_tokens - 1))
        found.append((request, use))
        for follower in request.followers:
            next_ns = at_ns + round(use.alone_s * NS_PER_S) + follower.after_ns
            if next_ns < follower.until_ns:
                heappush(queue, (next_ns, follower.request.index, follower.request))
    return found


def _use(setup: Setup, request: Request, hit: int) -> Use:
    (cluster,) = setup.prfaas
    prompt, new = request.num_prompt_tokens, max(1, request.num_prompt_tokens - hit)
    target_s = float("inf") if setup.slo.ttft_ns is None else setup.slo.ttft_ns / NS_PER_S
    local_s = setup.costs.local_prefill_ns(new) / NS_PER_S
    remote_s = cluster.costs.remote_prefill_ns(new) / NS_PER_S
    link_s = cluster.costs.shipped_bytes(prompt, hit) * BITS_PER_BYTE / cluster.link.bits_per_s
    alone_s = max(remote_s, link_s) + cluster.link.rtt_ns / NS_PER_S
    decode_s = max(request.num_output_tokens - 1, 0) * setup.step_ns(1, prompt) / NS_PER_S
    return Use(
        local_s if local_s <= target_s else float("inf"),
        remote_s if alone_s <= target_s else float("inf"),
        link_s,
        decode_s,
        min(local_s, alone_s) + decode_s,
    )


def _served(setup: Setup, came_s: FloatArray, uses: list[Use], window_s: float) -> float:
    """Solve the relaxation; requests that are served.

    Args:
        came_s: When each request came, s from the start of the window.
        uses: What serving each takes.
    """
    count, target_s = len(uses), (setup.slo.ttft_ns or 0) / NS_PER_S
    local = np.array([u.local_s for u in uses])
    remote = np.array([u.remote_s for u in uses])
    link, decode = np.array([u.link_s for u in uses]), np.array([u.decode_s for u in uses])
    rows, limits = (
        [coo_array(np.concatenate([decode, decode])[None])],
        [setup.num_decode * setup.decode.batch_max * (window_s + target_s)],
    )
    # (seconds that serving takes of a stage, whether remotely, instances of the stage)
    stages = (
        (np.where(np.isinf(local), 0, local), False, setup.num_prefill),
        (np.where(np.isinf(remote), 0, remote), True, setup.prfaas[0].num_instances),
        (link, True, 1),
    )
    for start_s, span_s in _spans(window_s):
        first, last = np.searchsorted(came_s, [start_s, start_s + span_s])
        columns, zeros = np.arange(first, last), np.zeros(last - first, int)
        for work, is_remote, instances in stages:
            at = zeros, columns + count * is_remote
            rows.append(coo_array((work[first:last], at), shape=(1, 2 * count)))
            limits.append(instances * (span_s + target_s))
    once = hstack([identity(count), identity(count)])
    solved = linprog(  # type: ignore[call-overload]  # The stubs know no sparse matrices.
        -np.ones(2 * count),
        A_ub=csr_array(vstack([*rows, once])),
        b_ub=np.concatenate([limits, np.ones(count)]),
        bounds=[(0, 0 if np.isinf(s) else 1) for s in np.concatenate([local, remote])],
        method="highs",
    )
    if not solved.success:
        raise ConfigError(f"the offline bound was not solved: {solved.message}")
    return float(-solved.fun)


def _spans(window_s: float) -> list[tuple[float, float]]:
    """Starts and lengths of the spans; those of one length overlap by half."""
    found = [(0.0, window_s)]
    for span_s in SPANS_S:
        starts = np.arange(0, max(window_s - span_s / 2, 0), span_s / 2)
        found += [(float(start), span_s) for start in starts]
    return found
