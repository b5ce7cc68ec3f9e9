"""Settings of a pool node: deployment file, members that it follows, options of its S3 tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from prfaas.audit.settings import AuditSettings
from prfaas.config.addresses import split_address
from prfaas.config.clusters import ClusterRole, PoolTable, S3Table
from prfaas.config.deployment import Deployment
from prfaas.config.governance.residency import pool_footprint
from prfaas.config.names import PATTERNS
from prfaas.errors import ConfigError
from prfaas.pool.receive.inbound_transfers import ReceiveLimits
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.pool.shared.settings import (
    PREFIX,
    S3Settings,
    SharedSettings,
    s3_settings,
    shared_settings,
)
from prfaas.toml_tables import validated
from prfaas.wire.identity import identity_in

if TYPE_CHECKING:
    from prfaas.config.deployment import Deployment
    from prfaas.core.membership.members import Listed
    from prfaas.membership.peer_entries import PeerClusters
    from prfaas.membership.port import Source
    from prfaas.pool.node.node import PoolNode
    from prfaas.pool.node.peer_members import PeerMembers


ADMIN = ("127.0.0.1", 7180)
ANY_INTERFACE = "0.0.0.0"  # noqa: S104 (only peers with an identity get past TLS)


def settings_in(deployment: Deployment, name: str, file: Path) -> dict[str, Any]:
    """Fields of `PoolProcessSettings` that a deployment file gives; ConfigError if there is no pool
    node of that name.

    `peers` has None for a pool whose address is not in the file; `listen` is missing where the file
    has neither `listen` nor `address`.
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


@dataclass(frozen=True, slots=True)
class Following:
    """Sources that a pool node follows."""

    clusters: PeerClusters
    """Clusters of the pool nodes that are its peers."""
    sources: Sequence[Source]
    start: Sequence[Listed] = ()
    """Members in the deployment file."""

    def members(self, node: PoolNode) -> PeerMembers:
        """The members of a pool node."""
        from prfaas.pool.node.peer_members import PeerMembers

        return PeerMembers(node.peers, self.clusters, self.sources, self.start)


def follow_file(
    file: Path,
    overlay: Path | None,
    deployment: Deployment,
    name: str,
    addresses: dict[str, tuple[str, int]],
    *,
    admits: bool,
) -> Following:
    """Follow a deployment file and the sources that it names.

    Args:
        overlay: Settings that take precedence over it.
        deployment: As it was read.
        addresses: Addresses of peers that options give.
        admits: Members may push as the file has it; no option names sources.
    """
    from prfaas.config.load import load_deployment
    from prfaas.membership.deployment_file import DeploymentFile, peer_view
    from prfaas.membership.peer_entries import PeerClusters, peer_clusters, peer_entries
    from prfaas.membership.sources import sources_of

    clusters = peer_clusters(deployment, name)
    if not admits:
        clusters = PeerClusters(clusters.targets, frozenset())
    watched = DeploymentFile(
        (file, overlay) if overlay else (file,),
        partial(load_deployment, file, overlay),
        deployment,
        peer_view(name, clusters, addresses),
    )
    return Following(
        clusters,
        [watched, *sources_of(deployment.membership, with_links=True)],
        peer_entries(deployment, name, clusters, addresses),
    )


def follow_sources(path: Path) -> Following:
    """Follow the sources that a file names; ConfigError if it cannot be used.

    Args:
        path: Of a `PeersFile`.
    """
    from prfaas.config.names import PATTERNS
    from prfaas.config.services import PeersFile
    from prfaas.membership.peer_entries import PeerClusters
    from prfaas.membership.sources import sources_of
    from prfaas.toml_tables import read_toml, validated

    table = validated(PeersFile, read_toml(path), path, words=PATTERNS)
    clusters = PeerClusters(frozenset(table.targets), frozenset(table.sources))
    return Following(clusters, sources_of(table, with_links=True))


Command = TypeVar("Command", bound=Callable[..., None])
START = "s3_"
_OPTIONS = [
    ("bucket", "Bucket for blocks that pool nodes of the site share."),
    ("keys", "File of the keys that encrypt what is in the bucket."),
    ("limit", "Limit of what this pool node keeps in the bucket."),
    ("prefix", f"Start of the names of objects; {PREFIX} without FILE."),
    ("endpoint", "URL of the S3 server; AWS if absent."),
    ("region", "Region of the bucket; that of the environment if absent."),
    ("deadline", "Longest time that reads from the bucket may take for a request; 1s if absent."),
    ("object-size", "Size of an object, 4MiB to 64MiB; 16MiB if absent."),
]


def s3_options(command: Command) -> Command:
    """Add the options, which the command gets as one dictionary `s3`."""
    for name, text in reversed(_OPTIONS):
        command = click.option(f"--s3-{name}", START + name.replace("-", "_"), help=text)(command)
    return command


def shared_tier(options: Mapping[str, str], below: SharedSettings | None) -> SharedSettings | None:
    """The tier that options name; ConfigError if they are incomplete or wrong.

    Args:
        options: Those that were given, by their names.
        below: Settings of the deployment file, which options override.
    """
    if not options:
        return below
    if isinstance(below, MooncakeSettings):
        raise ConfigError("--s3-...: the cluster has `mooncake`; a cluster has one shared tier")
    table = {} if below is None else _written(below)
    table |= {name.removeprefix(START): value for name, value in options.items()}
    made = validated(S3Table, table, Path("options --s3-..."), words=PATTERNS)
    return s3_settings(made, PREFIX)


def _written(settings: S3Settings) -> dict[str, Any]:
    """Settings as the table of a file has them."""
    found = {key: value for key, value in asdict(settings).items() if value is not None}
    del found["timing"]
    found["limit"] = f"{found.pop('limit_bytes')}B"
    found["object_size"] = f"{found.pop('pack_bytes')}B"
    found["deadline"] = f"{found.pop('deadline_ns') / 10**6}ms"
    return found
