"""Settings of a pool node from the deployment file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prfaas.audit.settings import AuditSettings
from prfaas.config.addresses import split_address
from prfaas.config.clusters import ClusterRole, PoolTable
from prfaas.config.deployment import Deployment
from prfaas.config.governance.residency import pool_footprint
from prfaas.errors import ConfigError
from prfaas.pool.receive.receive_limits import ReceiveLimits
from prfaas.pool.shared.settings import shared_settings
from prfaas.wire.identity import identity_in

ADMIN = ("127.0.0.1", 7180)
ANY_INTERFACE = "0.0.0.0"  # noqa: S104 (only peers with an identity get past TLS)


def settings_in(deployment: Deployment, name: str, file: Path) -> dict[str, Any]:
    """Fields of `PoolProcessSettings` that a deployment file gives.

    `peers` has None for a pool whose address is not in the file; `listen` is missing where the file
    has neither `listen` nor `address`.

    Raises:
        ConfigError: There is no pool node of that name.
    """
    clusters = deployment.clusters
    cluster_name = next((key for key, c in clusters.items() if name in c.pools), None)
    if cluster_name is None:
        known = ", ".join(deployment.pools)
        raise ConfigError(f"--name {name} is no pool node of {file}, which has {known}")
    cluster = clusters[cluster_name]
    table = cluster.pools[name]
    pools, sources = deployment.pools, [a for a, b in deployment.links if b == name]
    links = table.links.items()
    found: dict[str, Any] = {
        "memory_bytes": table.memory,
        "disk": table.disk,
        "disk_bytes": table.disk_limit or 0,
        "disk_keys": table.disk_keys,
        "own_disk_key": _own_key(deployment, name) if table.disk and table.disk_sealed else None,
        "shared": shared_settings(cluster, cluster_name),
        "socket_path": deployment.pool_socket(name),
        "admin": split_address(table.admin) if table.admin else ADMIN,
        "identity": identity_in(deployment.security.identities, name),
        "peers": _addresses({peer: pools[peer] for peer in deployment.destinations(name)}),
        "sources": frozenset(sources),
        "gateways": frozenset(deployment.gateways),
        "site_budget": cluster.link_budget or 0,
        "site": frozenset(cluster.pools if cluster.link_budget else ()),
        "link_budgets": {peer: link.budget for peer, link in links if link.budget},
        "link_connections": {peer: link.connections for peer, link in links if link.connections},
        "link_codec": table.link_codec,
        "link_encryption": table.link_encryption,
        "link_lanes": table.link_lanes,
        "audit": AuditSettings.of(deployment.audit),
        "regions": pool_footprint(cluster, table),
        "needs_grant": cluster.role is ClusterRole.PRFAAS and bool(deployment.residency.all),
        "tracing": deployment.tracing.endpoint if deployment.tracing else None,
        "drain_ns": table.drain_timeout,
        "receive": ReceiveLimits(transfers_max=table.transfers_max),
    }
    if table.listen or table.address:
        found["listen"] = split_address(table.listen or _any_interface(table.address or ""))
    return found


def _own_key(deployment: Deployment, name: str) -> Path:
    return deployment.state / f"{name}.disk-key"


def _addresses(pools: dict[str, PoolTable]) -> dict[str, tuple[str, int] | None]:
    return {
        name: split_address(pool.address) if pool.address else None for name, pool in pools.items()
    }


def _any_interface(address: str) -> str:
    return f"{ANY_INTERFACE}:{split_address(address)[1]}"
