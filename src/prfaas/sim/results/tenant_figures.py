"""Figures by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prfaas.core.request.events import Outcome
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S


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
