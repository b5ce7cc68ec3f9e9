"""The live parts of a gateway, which its pages show and operators change."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.config.deployment import Deployment
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.resilience.quarantine import Guards
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.pools.layout_check import LayoutCheck
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import Records
from prfaas.membership.follower import MembershipFollower


@dataclass(frozen=True, slots=True)
class LiveParts:
    """Parts that outlive every request.

    Attributes:
        index: Blocks in pools, and in the device memory of engines.
        layouts: Differences between the KV layouts of engines.
        guards: Breakers of engines and links.
        journal: Recent changes by loops and operators.
        members: Engines and pool nodes that come and go.
    """

    deployment: Deployment
    index: PrefixIndex
    driver: Driver
    engines: Engines
    pools: Pools
    layouts: LayoutCheck
    guards: Guards
    journal: Journal
    members: MembershipFollower
    metrics: GatewayMetrics
    records: Records
