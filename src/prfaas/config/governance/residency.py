"""Regions of a deployment file: footprints of clusters, and the rules for them and for tenants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prfaas.config.clusters import ClusterRole, ClusterTable, PoolTable
from prfaas.config.tenants import TenantTable
from prfaas.core.kv.blocks import HashScheme
from prfaas.core.transfer.residency import REGIONS_MAX, Regions, Residency, frozen


def pool_footprint(cluster: ClusterTable, pool: PoolTable) -> Regions:
    """Regions where the blocks of a pool node rest: its host, its disk, the tier of its cluster.

    What lies in a shared tier is read by all hosts of the cluster.
    """
    if cluster.s3 is not None or cluster.mooncake is not None:
        return footprint(cluster)
    return frozenset(filter(None, (pool.region or cluster.region, pool.disk_region)))


def footprint(cluster: ClusterTable) -> Regions:
    """Regions where the blocks of a cluster rest."""
    found = {cluster.region, _tier_region(cluster)}
    for pool in cluster.pools.values():
        found |= {pool.region, pool.disk_region}
    return frozenset(filter(None, found))


def residency_of(
    clusters: Mapping[str, ClusterTable], tenants: Mapping[str, TenantTable]
) -> Residency:
    """Footprints and limits of a deployment file."""
    if not any(table.region for table in clusters.values()):
        return Residency()
    return Residency(
        {name: footprint(table) for name, table in clusters.items()},
        frozen({name: t.regions for name, t in tenants.items() if t.regions is not None}),
    )


def check_regions(clusters: Mapping[str, ClusterTable], tenants: Mapping[str, TenantTable]) -> None:
    """See that all regions are given and known, and that every tenant can be served.

    Raises:
        ValueError: They are not; the message names the key.
    """
    if not any(table.region for table in clusters.values()):
        for key in _keys_without_regions(clusters, tenants):
            raise ValueError(f"{key}: no cluster has a region; set clusters.NAME.region of each")
        return
    for name, table in clusters.items():
        _check_cluster(name, table)
        _check_pages(name, table)
    found = residency_of(clusters, tenants)
    known = ", ".join(sorted(found.all))
    if len(found.all) > REGIONS_MAX:
        raise ValueError(f"{len(found.all)} regions ({known}); the limit is {REGIONS_MAX}")
    for name, allowed in found.tenants.items():
        key = f"tenants.{name}.regions"
        if not allowed:
            raise ValueError(f"{key} is empty: nothing may serve it; list regions of {known}")
        for region in sorted(allowed - found.all):
            raise ValueError(f"{key}: {region!r} is the region of no cluster; known are {known}")
        for cluster, table in clusters.items():
            outside = found.outside(name, cluster)
            if table.role is ClusterRole.PD and outside:
                raise ValueError(
                    f"{key} allows {', '.join(sorted(allowed))}: it can be served nowhere, since "
                    f"blocks of the PD cluster {cluster} rest in {', '.join(sorted(outside))} too; "
                    "allow that, or serve the tenant from a deployment whose PD clusters are "
                    "inside its regions"
                )


def _check_pages(name: str, table: ClusterTable) -> None:
    """With regions, pool nodes of PrfaaS clusters keep blocks of ticketed requests alone."""
    scheme = table.timing.hash_scheme if table.timing else None
    if table.role is ClusterRole.PRFAAS and scheme is HashScheme.SGLANG_PAGES:
        raise ValueError(
            f"clusters.{name}.timing.hash_scheme: pages of SGLang come without the ticket of their "
            "request, and with regions a pool node of a PrfaaS cluster keeps none of those; remove "
            "the regions, or use engines of vLLM's kind"
        )


def _check_cluster(name: str, table: ClusterTable) -> None:
    key = f"clusters.{name}"
    if table.region is None:
        raise ValueError(f"{key}.region is missing: other clusters have one")
    if table.s3 is not None and table.s3.data_region is None:
        raise ValueError(
            f"{key}.s3.data_region is missing: the cluster has a region, and a bucket can be in "
            "another one"
        )


def _tier_region(table: ClusterTable) -> str | None:
    tier = table.s3 or table.mooncake
    return None if tier is None else tier.data_region


def _keys_without_regions(
    clusters: Mapping[str, ClusterTable], tenants: Mapping[str, TenantTable]
) -> Iterator[str]:
    for name, table in tenants.items():
        if table.regions is not None:
            yield f"tenants.{name}.regions"
    for name, cluster in clusters.items():
        if _tier_region(cluster):
            yield f"clusters.{name}.{'s3' if cluster.s3 else 'mooncake'}.data_region"
        for pool_name, pool in cluster.pools.items():
            for key in ("region", "disk_region"):
                if getattr(pool, key):
                    yield f"clusters.{name}.pools.{pool_name}.{key}"
