"""The dispatcher of a deployment: its clusters, links, roles and settings, from file and plan."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.config.engines.cores import within
from prfaas.core.control.role_loop import Role, RoleLoop, RoleSettings
from prfaas.core.control.split import Split, decode_name
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import DispatchSettings, HomeCluster, Member, RemoteCluster
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.gateway.routing.pool_state import LinkName
from prfaas.gateway.routing.profiles import Profiles
from prfaas.gateway.tenancy.tenants import fairness
from prfaas.market.price_file import deployment_market


def make_dispatcher(
    deployment: Deployment,
    profiles: Profiles,
    *,
    has_roles: bool,
    calibration: CalibrationSettings | None = None,
) -> Dispatcher:
    """Make the dispatcher of a deployment.

    Args:
        has_roles: PD engines prefill or decode, and none does both.
        calibration: Limits of the corrections of predictions; None takes the usual ones.
    """
    home, away = (
        clusters_of(deployment, ClusterRole.PD),
        clusters_of(deployment, ClusterRole.PRFAAS),
    )
    members, decoders, routing = _members(home), None, deployment.routing
    shared = within(deployment)
    if has_roles:
        decoders = tuple(Member(decode_name(each.name), each.pool) for each in members)
    return Dispatcher(
        HomeCluster(next(iter(home)), members, decoders, profiles.home),
        [
            RemoteCluster(
                name,
                _members({name: cluster}, shared),
                profiles.remote.get(name),
                profiles.price_per_tb.get(name, 0.0),
                profiles.link_bits_per_s.get(name, 0.0),
            )
            for name, cluster in away.items()
        ],
        DispatchSettings(
            policy=routing.effective_policy,
            offload_threshold=routing.offload_threshold,
            bandwidth=routing.bandwidth,
            moving_threshold=routing.short_term_loop,
            admission=routing.ttft_max is not None
            or any(each.ttft is not None for each in deployment.classes.values()),
            ttft_max_ns=routing.ttft_max,
            fairness=fairness(deployment),
            pulls=routing.pull,
            second_price=routing.second_price,
            calibration=calibration or CalibrationSettings(),
            residency=deployment.residency,
            market=deployment_market(deployment, profiles.sites),
        ),
    )


def make_split(deployment: Deployment, profiles: Profiles) -> Split | None:
    """The split that a deployment file gives; None where engines do both."""
    engines = {
        name: engine.role
        for cluster in deployment.with_role(ClusterRole.PD)
        for name, engine in cluster.engines.items()
    }
    if not deployment.has_roles:
        return None
    routing = deployment.routing
    loop = None
    if routing.reroling:
        # An assignment changes at once: the engine keeps what it has loaded.
        settings = RoleSettings(conversion_ns=0).paced(routing.reroling_dwell)
        loop = RoleLoop(routing.offload_threshold, settings)
    roles = [Role(role.value) for role in engines.values()]
    return Split(list(engines), roles, loop, profiles.decode_slots, profiles.plans)


def link_prices(deployment: Deployment, profiles: Profiles) -> dict[LinkName, float]:
    """Price of 10**12 bytes, by link to the PD cluster."""
    return {
        (source, destination): profiles.price_per_tb.get(name, 0.0)
        for name, cluster in clusters_of(deployment, ClusterRole.PRFAAS).items()
        for source in pools_of({name: cluster})
        for destination in pools_of(clusters_of(deployment, ClusterRole.PD))
    }


def clusters_of(deployment: Deployment, role: ClusterRole) -> dict[str, ClusterTable]:
    """Clusters of a role, by name."""
    return {name: table for name, table in deployment.clusters.items() if table.role is role}


def _members(
    clusters: Mapping[str, ClusterTable],
    within: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> tuple[Member, ...]:
    return tuple(
        Member(name, engine.pool, within.get(name, frozenset()))
        for cluster in clusters.values()
        for name, engine in cluster.engines.items()
    )


def pools_of(clusters: Mapping[str, ClusterTable]) -> tuple[str, ...]:
    """Pools of the engines of some clusters."""
    engines = (e for cluster in clusters.values() for e in cluster.engines.values())
    return tuple(dict.fromkeys(engine.pool for engine in engines))
