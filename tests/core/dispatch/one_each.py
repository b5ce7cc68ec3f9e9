"""A dispatcher of one instance on either side of a link, where a token takes 1 ms."""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
    Routed,
)
from prfaas.core.routing.policies import PolicyName
from prfaas.core.routing.predictions import Costs
from prfaas.units import NS_PER_S

MS = NS_PER_S // 1000
PROMPT = 1050


def dispatcher(policy: PolicyName) -> Dispatcher:
    """One instance on either side; a token takes 1 ms."""
    tokens = range(3)
    table = [MS * n for n in tokens]
    costs = Costs(table, table, [1000 * n for n in tokens], 0, 1000)
    made = Dispatcher(
        LocalCluster("pd", (ClusterMember("p", "home"),), (ClusterMember("d", "home"),), costs),
        [RemoteCluster("away", (ClusterMember("r", "far"),), costs)],
        DispatchSettings(policy, 1000),
    )
    made.set_link("far", "home", up=True)
    made.links.report("far", "home", LinkReport(0, 1e12, 0, 0, MS))
    return made


def arrive(made: Dispatcher, number: int, hits: Mapping[str, int]) -> Routed:
    found = made.arrive(Arrival(number, PROMPT, PROMPT, hits), 0)
    assert isinstance(found, Routed)
    return found
