"""An upper bound of goodput for a scenario, from a relaxation that knows all that arrives.

Each request takes prefill time at home, or prefill time away and bytes on the link, and decode time
either way. The relaxation serves fractions of requests, in any order, with everything known in
advance, and lets every stage work until the last target has passed. No policy can do better:

    maximise    the requests that are served, home or away
    such that   prefill time at home   <= instances x (window + target)
                prefill time away      <= instances x (window + target)
                bytes on the link      <= rate x (window + target)
                decode slots           <= slots x (window + target), each for the shortest time

A request that cannot meet its target alone on an idle path does not take that path. Cached prefixes
count as in a cache without limits that already holds what came before: no policy hits more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack, identity, vstack

from prfaas.core.predictions import BITS_PER_BYTE
from prfaas.sim.request import Request
from prfaas.sim.scenario import Scenario
from prfaas.sim.setup import Setup
from prfaas.units import NS_PER_S


@dataclass(frozen=True)
class Use:
    """Seconds of each stage that serving a request takes.

    Attributes:
        local_s: Prefill at home; inf where that is late even alone.
        remote_s: Prefill away; inf the same.
        link_s: On the link.
        decode_s: Decode slot.
    """

    local_s: float
    remote_s: float
    link_s: float
    decode_s: float


def bound(scenario: Scenario) -> float:
    """Upper bound of the goodput of a scenario with one PrfaaS cluster, req/s."""
    requests = [r for r in scenario.requests() if r.arrived_at_ns >= scenario.start_ns]
    setup = scenario.setup
    end_ns = scenario.end_ns or max(r.arrived_at_ns for r in requests) + 1
    window_s = (end_ns - scenario.start_ns) / NS_PER_S
    hits = _hits(scenario.requests(), setup.blocks.tokens) if setup.cache.host_blocks != 0 else {}
    uses = [_use(setup, r, hits.get(r.index, 0)) for r in requests]
    return _served(setup, uses, window_s + (setup.slo.ttft_ns or 0) / NS_PER_S) / window_s


def _hits(requests: list[Request], span: int) -> dict[int, int]:
    """Longest prefix that any earlier request had, tokens."""
    seen: set[int] = set()
    found = {}
    for request in requests:
        length = 0
        for block in request.block_ids:
            if block not in seen:
                break
            length += 1
        found[request.index] = min(length * span, request.num_prompt_tokens - 1)
        seen.update(request.block_ids)
    return found


def _use(setup: Setup, request: Request, hit: int) -> Use:
    (cluster,) = setup.prfaas
    prompt, new = request.num_prompt_tokens, max(1, request.num_prompt_tokens - hit)
    target_s = float("inf") if setup.slo.ttft_ns is None else setup.slo.ttft_ns / NS_PER_S
    local_s = setup.costs.local_prefill_ns(new) / NS_PER_S
    remote_s = cluster.costs.remote_prefill_ns(new) / NS_PER_S
    link_s = cluster.costs.shipped_bytes(prompt, hit) * BITS_PER_BYTE / cluster.link.bits_per_s
    alone_s = max(remote_s, link_s) + cluster.link.rtt_ns / NS_PER_S
    steps = max(request.num_output_tokens - 1, 0)
    return Use(
        local_s if local_s <= target_s else float("inf"),
        remote_s if alone_s <= target_s else float("inf"),
        link_s,
        steps * setup.step_ns(1, prompt) / NS_PER_S,
    )


def _served(setup: Setup, uses: list[Use], time_s: float) -> float:
    """Solve the relaxation; requests that are served."""
    count = len(uses)
    local = np.array([u.local_s for u in uses])
    remote = np.array([u.remote_s for u in uses])
    link, decode = np.array([u.link_s for u in uses]), np.array([u.decode_s for u in uses])
    zero = np.zeros(count)
    rows = csr_array(
        np.vstack(
            [
                np.concatenate([np.where(np.isinf(local), 0, local), zero]),
                np.concatenate([zero, np.where(np.isinf(remote), 0, remote)]),
                np.concatenate([zero, link]),
                np.concatenate([decode, decode]),
            ]
        )
    )
    once = hstack([identity(count, format="csr"), identity(count, format="csr")])
    limits = [
        setup.num_prefill * time_s,
        setup.prfaas[0].num_instances * time_s,
        time_s,
        setup.num_decode * setup.decode.batch_max * time_s,
    ]
    solved = linprog(
        -np.ones(2 * count),
        A_ub=vstack([rows, once]).tocsr(),
        b_ub=np.concatenate([limits, np.ones(count)]),
        bounds=[(0, 0 if np.isinf(s) else 1) for s in np.concatenate([local, remote])],
        method="highs",
    )
    if not solved.success:
        raise SystemExit(f"the relaxation was not solved: {solved.message}")
    return float(-solved.fun)
