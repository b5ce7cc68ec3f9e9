"""`[residency]` of a scenario file: the same rule as in a deployment file, without its clusters."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict

from prfaas.core.transfer.residency import Residency, frozen
from prfaas.errors import ConfigError


class ResidencyTable(BaseModel):
    """`[residency]`: the regions where blocks rest, and those where a tenant's may."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    clusters: dict[str, set[str]] = {}
    """Regions of a cluster's hosts and storage, by its name in the plan."""
    tenants: dict[str, set[str]] = {}
    """Regions that a tenant of `workload.tenants` is limited to."""

    def among(self, clusters: Collection[str]) -> Residency:
        """The rule for these clusters; ConfigError if a region is given for another one."""
        if unknown := self.clusters.keys() - set(clusters):
            raise ConfigError(
                f"residency.clusters: {sorted(unknown)} are not clusters: {sorted(clusters)}"
            )
        return Residency(frozen(self.clusters), frozen(self.tenants))
