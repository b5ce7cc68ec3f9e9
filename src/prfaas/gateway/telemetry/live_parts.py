"""The live parts of a gateway, which its pages show and operators change."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.config.deployment import Deployment
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.pools.layout_check import LayoutCheck
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.telemetry.request_records import Records
from prfaas.membership.follower import MembershipFollower


@dataclass(frozen=True, slots=True)
class LiveParts:
    """Parts that outlive every request."""

    deployment: Deployment
    driver: Driver
    engines: Engines
    pools: Pools
    layouts: LayoutCheck
    """Differences between the KV layouts of engines."""
    journal: Journal
    """Recent changes by loops and operators."""
    members: MembershipFollower
    """Engines and pool nodes that come and go."""
    records: Records
