"""Lines of `prfaas check` about regions."""

from __future__ import annotations

from collections.abc import Iterator

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.transfer.residency import Regions


def residency_lines(deployment: Deployment) -> Iterator[str]:
    """Footprints of clusters, limits of tenants, and the tenants for which pools trust gateways."""
    residency = deployment.residency
    if not residency.all:
        return
    shown = (f"{name} in {_listed(regions)}" for name, regions in residency.clusters.items())
    yield f"residency: blocks of {'; '.join(shown)}"
    remote = [n for n, table in deployment.clusters.items() if table.role is ClusterRole.PRFAAS]
    for tenant, allowed in residency.tenants.items():
        barred = [name for name in remote if residency.bars(tenant, name)]
        where = f"not offloaded to {', '.join(barred)}" if barred else "offloaded to any cluster"
        yield f"residency: tenant {tenant} in {_listed(allowed)}; {where}"
    for tenant, allowed in residency.tenants.items():
        if beyond := deployment.gateway_regions - allowed:
            yield (
                f"residency: pool nodes take the gateways' word that blocks of {tenant} do not go "
                f"to {_listed(beyond)}, for which their certificates sign too; gateways of its own "
                "are bound by their certificates (docs/residency.md)"
            )


def _listed(regions: Regions) -> str:
    return ", ".join(sorted(regions))
