"""Residency: the regions that the blocks of a tenant may be in.

A *footprint* is the set of regions where blocks of a pool or a cluster come to rest: those of its
hosts, its disks and its shared tier. A tenant's blocks may be in a pool only if all of its
footprint is allowed, so what lies in a pool may move to every tier below it. Gateway and simulator
exclude PrfaaS clusters by `Residency.bars`; pools check tickets by
`check_ticket_regions`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prfaas.core.transfer.tickets import Ticket, TicketRefusal, TicketRefusedError
from prfaas.errors import ConfigError

REGIONS_MAX = 16
"""Regions of a deployment: a ticket and a certificate name all that are allowed."""
REGION = r"^[a-z0-9][a-z0-9-]{0,31}$"
"""Form of the name of a region."""
Regions = frozenset[str]
_NONE: Regions = frozenset()


@dataclass(frozen=True, slots=True)
class Residency:
    """Place where blocks rest, and where they may."""

    clusters: Mapping[str, Regions] = field(default_factory=dict)
    """Footprint of each cluster. Without any, no tenant is limited."""
    tenants: Mapping[str, Regions] = field(default_factory=dict)
    """Allowed regions of each tenant that is limited; others are allowed in all."""

    def outside(self, tenant: str, cluster: str) -> Regions:
        """Regions of a cluster's footprint that a tenant excludes; none if it may use it."""
        allowed = self.tenants.get(tenant)
        return _NONE if allowed is None else self.clusters.get(cluster, _NONE) - allowed

    def bars(self, tenant: str, cluster: str) -> bool:
        """Return True if a tenant's prompts may not go to a cluster."""
        return tenant in self.tenants and bool(self.outside(tenant, cluster))

    @property
    def all(self) -> Regions:
        """All regions of the deployment."""
        return frozenset().union(*self.clusters.values())

    def allowed(self, tenant: str) -> Regions:
        """Regions that the tickets of a tenant name; none in a deployment without regions."""
        return self.tenants.get(tenant, self.all)

    def signed_by_gateways(self, tenants: Iterable[str]) -> Regions:
        """Regions that the certificate of a gateway has to name, to sign for these tenants."""
        return frozenset().union(*map(self.allowed, tenants))


def frozen(named: Mapping[str, Iterable[str]]) -> dict[str, Regions]:
    """Regions by name, as `Residency` has them."""
    return {name: frozenset(regions) for name, regions in named.items()}


EVERYWHERE = Residency()
"""A deployment without regions."""


def check_region(name: str) -> None:
    """See that a region can have this name; ConfigError if it cannot."""
    if not re.fullmatch(REGION, name) or name.endswith("\n"):
        raise ConfigError(
            f"{name!r} is no region: lower-case letters, digits and dashes, 32 characters at most"
        )


def check_ticket_regions(ticket: Ticket, own: Regions, peer: str, peer_regions: Regions) -> None:
    """See that a ticket allows the regions of both ends of a transfer; TicketRefusedError if it
    does not, or a region is not known.

    Args:
        ticket: Its signature was checked.
        own: Footprint of the pool that checks; without any, everything is allowed.
        peer: Name of the pool at the other end.
        peer_regions: Regions in the certificate of that pool.
    """
    if not own:
        return
    if not ticket.regions:
        raise TicketRefusedError(
            TicketRefusal.NO_REGION, f"it names no region, and this pool is in {_listed(own)}"
        )
    if not peer_regions:
        raise TicketRefusedError(
            TicketRefusal.NO_REGION,
            f"no certificate of {peer} with a region was seen; make one with --region",
        )
    if unsigned := ticket.regions - ticket.signer_regions:
        raise TicketRefusedError(
            TicketRefusal.REGION if ticket.signer_regions else TicketRefusal.NO_REGION,
            f"the certificate of {ticket.signer} does not let it sign for {_listed(unsigned)}",
        )
    if outside := (own | peer_regions) - ticket.regions:
        raise TicketRefusedError(
            TicketRefusal.REGION, f"it allows {_listed(ticket.regions)}, and not {_listed(outside)}"
        )


def _listed(regions: Regions) -> str:
    return ", ".join(sorted(regions))
