"""Pool nodes of a deployment file as one of them sees them: its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prfaas.config.addresses import join_address
from prfaas.config.clusters import ClusterRole, LinkTable
from prfaas.config.deployment import Deployment
from prfaas.core.membership.members import Listed, Member, MemberKind, Site
from prfaas.membership.entries import link_settings

CLUSTERLESS = ""
"""Cluster of the peers that the command line names."""


@dataclass(frozen=True, slots=True)
class PeerClusters:
    """Clusters whose pool nodes are peers of a pool node."""

    targets: frozenset[str]
    """It pushes to theirs."""
    sources: frozenset[str]
    """Theirs may push to it."""

    @property
    def site(self) -> Site:
        """The facts with which peers have to agree."""
        return Site(dict.fromkeys({CLUSTERLESS, *self.targets, *self.sources}, ()), "")


def peer_clusters(deployment: Deployment, name: str) -> PeerClusters:
    """The rule of `Deployment.links`, for clusters; ValueError if there is no pool node of that
    name."""
    own = cluster_of(deployment, name)
    roles: dict[ClusterRole, set[str]] = {role: set() for role in ClusterRole}
    for cluster, table in deployment.clusters.items():
        roles[table.role].add(cluster)
    if own in roles[ClusterRole.PRFAAS]:
        return PeerClusters(frozenset(roles[ClusterRole.PD] | {own}), frozenset({own}))
    return PeerClusters(frozenset({own}), frozenset(roles[ClusterRole.PRFAAS] | {own}))


def peer_entries(
    deployment: Deployment,
    name: str,
    clusters: PeerClusters,
    addresses: Mapping[str, tuple[str, int]],
) -> list[Listed]:
    """Peers of a pool node; ValueError if the address of a target is unknown.

    Args:
        addresses: Addresses of peers that are given elsewhere.
    """
    links, found = deployment.pools[name].links, []
    for cluster, table in deployment.clusters.items():
        if cluster not in clusters.targets | clusters.sources:
            continue
        for peer, pool in table.pools.items():
            if peer == name:
                continue
            given = addresses.get(peer)
            address = join_address(given) if given else pool.address
            if address is None and cluster in clusters.targets:
                raise ValueError(f"clusters.{cluster}.pools.{peer} has no `address`; give one")
            link = links.get(peer, LinkTable())
            settings = link_settings(link.budget, link.connections)
            # The address of a pool node that only pushes to this one does not matter.
            member = Member(peer, MemberKind.POOL, cluster, address or peer, settings=settings)
            found.append(Listed(member))
    return found


def cluster_of(deployment: Deployment, name: str) -> str:
    """The cluster of a pool node; ValueError if it is in none."""
    for cluster, table in deployment.clusters.items():
        if name in table.pools:
            return cluster
    raise ValueError(f"this pool node, {name}, is not in the file any more; stop it")
