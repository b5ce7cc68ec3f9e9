"""Who got what: figures by tenant, and whether a request met its targets."""

from __future__ import annotations

from prfaas.sim.request import Outcome, Request
from prfaas.sim.setup import SloSetup
from prfaas.sim.simulation import Simulation
from prfaas.units import NS_PER_S


def is_good(request: Request, slo: SloSetup) -> bool:
    """Whether a finished request met every target."""
    in_time = slo.ttft_ns is None or request.ttft_ns <= slo.ttft_ns
    return in_time and (slo.tpot_ns is None or request.tpot_ns <= slo.tpot_ns)


def by_tenant(sim: Simulation, arrived: list[Request]) -> dict[str, dict[str, float]]:
    """Requests that arrived, were let in and met every target, and prefill that was let in, s."""
    found: dict[str, dict[str, float]] = {}
    for r in sorted(arrived, key=lambda request: request.tenant):
        row = found.setdefault(r.tenant, {"arrived": 0, "let_in": 0, "good": 0, "prefill_s": 0.0})
        row["arrived"] += 1
        if r.outcome is not Outcome.REJECTED:
            row["let_in"] += 1
            row["prefill_s"] += sim.setup.costs.local_prefill_ns(r.num_new_tokens) / NS_PER_S
            row["good"] += r.outcome is Outcome.FINISHED and is_good(r, sim.setup.slo)
    return found


def jain_index(shares: list[float]) -> float:
    """Jain's index of fairness: 1 when all shares are equal, 1/n when one of n has everything."""
    squares = sum(share**2 for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
