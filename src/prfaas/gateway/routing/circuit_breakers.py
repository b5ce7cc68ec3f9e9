"""The breakers of a deployment: those of its engines, and of the links between its pools."""

from __future__ import annotations

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.control.changes import Loop
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.resilience.quarantine import Guards, Target, label_of
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver

_WHY = {
    BreakerState.OPEN: "too many of its requests failed",
    BreakerState.HALF_OPEN: "its time is over; one request probes",
    BreakerState.CLOSED: "the probe succeeded",
}


def make_guards(deployment: Deployment, driver: Driver, journal: Journal) -> Guards:
    """Breakers of all engines and links; every change is recorded in the journal."""
    local = deployment.with_role(ClusterRole.PD)
    remote = deployment.with_role(ClusterRole.PRFAAS)
    engines = [name for cluster in (*local, *remote) for name in cluster.engines]

    def changed(target: Target, before: BreakerState, after: BreakerState) -> None:
        journal.note(
            Loop.BREAKER,
            after.value,
            label_of(target),
            old=before.value,
            new=after.value,
            why=_WHY[after],
        )

    at_local = frozenset(name for cluster in local for name in cluster.engines)
    return Guards([*engines, *deployment.links], driver, changed, [at_local])
