"""The roles of PD engines that a deployment file gives."""

from __future__ import annotations

from prfaas.config.clusters import ClusterRole, EngineRole
from prfaas.config.deployment import Deployment
from prfaas.core.control.role_loop import Role, RoleLoop, RoleSettings
from prfaas.core.control.split import Split
from prfaas.gateway.routing.profiles import Profiles


def make_split(deployment: Deployment, profiles: Profiles) -> Split | None:
    """The split that a deployment file gives; None where engines do both."""
    engines = {
        name: engine.role
        for cluster in deployment.with_role(ClusterRole.PD)
        for name, engine in cluster.engines.items()
    }
    if EngineRole.BOTH in engines.values():
        return None
    routing = deployment.routing
    loop = None
    if routing.reroling:
        # An assignment changes at once: the engine keeps what it has loaded.
        settings = RoleSettings(conversion_ns=0).paced(routing.reroling_dwell)
        loop = RoleLoop(routing.offload_threshold, settings)
    roles = [Role(role.value) for role in engines.values()]
    return Split(list(engines), roles, loop, profiles.decode_slots, profiles.plans)
