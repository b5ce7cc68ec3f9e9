"""A dispatcher with two clusters."""

from __future__ import annotations

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RefusedRequest,
    RemoteCluster,
    Routed,
)
from prfaas.core.routing.policies import PolicyName
from prfaas.core.routing.predictions import Costs
from prfaas.units import NS_PER_S

MS = NS_PER_S // 1000


def costs(remote_ns: int = 100_000) -> Costs:
    """300 µs a token at home, 1,000 bytes a token."""
    tokens = range(3)
    return Costs(
        [300_000 * n for n in tokens],
        [remote_ns * n for n in tokens],
        [1000 * n for n in tokens],
        0,
        1000,
    )


def dispatcher(policy: PolicyName = PolicyName.ADAPTIVE, *, mixed: bool = True) -> Dispatcher:
    """Two PD instances with a pool each, and two PrfaaS clusters: "fast" and "slow"."""
    local = (ClusterMember("h0", "home-0"), ClusterMember("h1", "home-1"))
    made = Dispatcher(
        LocalCluster("pd", local, None if mixed else (ClusterMember("d0", "home-0"),), costs()),
        [
            RemoteCluster("slow", (ClusterMember("s0", "slow"),), costs(250_000)),
            RemoteCluster(
                "fast", (ClusterMember("f0", "fast"), ClusterMember("f1", "fast")), costs()
            ),
        ],
        DispatchSettings(policy, 1000),
    )
    for source in ("slow", "fast"):
        for destination in ("home-0", "home-1"):
            made.set_link(source, destination, up=True)
            made.links.report(source, destination, LinkReport(0, 1e10, 0, 0, MS))
    return made


def sent(found: Routed | RefusedRequest) -> Routed:
    assert isinstance(found, Routed)
    return found
