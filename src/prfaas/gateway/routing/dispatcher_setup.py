"""The dispatcher of a deployment: its profiles, clusters, links, roles and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.config.engines.cores import within
from prfaas.core.control.role_loop import Role, RoleLoop, RoleSettings
from prfaas.core.control.split import Plans, Split, decode_name
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import ClusterMember, DispatchSettings, LocalCluster, RemoteCluster
from prfaas.core.market.choice import PlannedSite
from prfaas.core.market.market import Market
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.predictions import CostModel
from prfaas.gateway.tenancy.tenants import fairness


@dataclass(frozen=True, slots=True)
class Profiles:
    """Costs by cluster; empty without a plan."""

    local: CostModel | None = None
    """Profile of the PD cluster."""
    remote: Mapping[str, CostModel] = field(default_factory=dict)
    """Of PrfaaS clusters by name."""
    link_bits_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rates of their links in the plan, by name; stand in for those not measured yet."""
    price_per_tb: Mapping[str, float] = field(default_factory=dict)
    """Of 10**12 bytes on their links, by name."""
    decode_slots: int = 0
    """Requests that a PD instance decodes at a time; 0 is unknown."""
    num_local: int = 0
    plans: Plans | None = None
    """The best threshold for every split of the PD instances."""
    sites: Mapping[str, PlannedSite] = field(default_factory=dict)
    """GPUs, prices and round trips of all clusters by name."""
    market: Market | None = None
    """Prices; None without."""
    engine_slots: Mapping[str, int] = field(default_factory=dict)
    """Sequences that a timing engine runs at once, by name."""
    attention_tokens: int = 0
    """Without a plan: context at which attention costs a token of the model as much as all else; 0
    is unknown."""


NO_PLAN = Profiles()


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
    local = deployment.clusters_of(ClusterRole.PD)
    remotes = deployment.clusters_of(ClusterRole.PRFAAS)
    members, decoders, routing = _members(local), None, deployment.routing
    shared = within(deployment)
    if has_roles:
        decoders = tuple(ClusterMember(decode_name(each.name), each.pool) for each in members)
    return Dispatcher(
        LocalCluster(next(iter(local)), members, decoders, profiles.local),
        [
            RemoteCluster(
                name,
                _members({name: cluster}, shared),
                profiles.remote.get(name),
                profiles.price_per_tb.get(name, 0.0),
                profiles.link_bits_per_s.get(name, 0.0),
            )
            for name, cluster in remotes.items()
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
            market=profiles.market,
            attention_tokens=profiles.attention_tokens,
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


def _members(
    clusters: Mapping[str, ClusterTable],
    within: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> tuple[ClusterMember, ...]:
    return tuple(
        ClusterMember(name, engine.pool, within.get(name, frozenset()))
        for cluster in clusters.values()
        for name, engine in cluster.engines.items()
    )
