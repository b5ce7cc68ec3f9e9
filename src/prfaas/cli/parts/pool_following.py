"""Members that a pool node follows: those of its deployment file, or of other sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prfaas.config.deployment import Deployment
    from prfaas.core.membership.members import Listed
    from prfaas.membership.peer_entries import PeerClusters
    from prfaas.membership.port import Source
    from prfaas.pool.node.node import PoolNode
    from prfaas.pool.node.peer_members import PeerMembers


@dataclass(frozen=True, slots=True)
class Following:
    """Sources that a pool node follows.

    Attributes:
        clusters: Clusters of the pool nodes that are its peers.
        start: Members in the deployment file.
    """

    clusters: PeerClusters
    sources: Sequence[Source]
    start: Sequence[Listed] = ()

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
    """Follow the sources that a file names.

    Args:
        path: Of a `PeersFile`.

    Raises:
        ConfigError: It cannot be used.
    """
    from prfaas.config.membership import PeersFile
    from prfaas.config.names import PATTERNS
    from prfaas.membership.peer_entries import PeerClusters
    from prfaas.membership.sources import sources_of
    from prfaas.toml_tables import read_toml, validated

    table = validated(PeersFile, read_toml(path), path, words=PATTERNS)
    clusters = PeerClusters(frozenset(table.targets), frozenset(table.sources))
    return Following(clusters, sources_of(table, with_links=True))
