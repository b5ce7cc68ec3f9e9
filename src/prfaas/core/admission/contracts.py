"""Contracts of the PD sites that share a PrfaaS cluster.

Owners of tags: the site whose tenant a tag belongs to.

A tag follows from a secret of its site, so that no other site can name it. The first site that uses
one owns it from then on: a ticket, a prompt or a purge of another site with that tag is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prfaas.core.cache.tenant_shares import Share

SITES_MAX = 100


@dataclass(frozen=True, slots=True)
class Contract:
    """The part of a PrfaaS cluster that one PD site may use."""

    site: str
    share: float
    """Its part of the engines while all sites want more than there is, relative to the shares of
    the others; above 0."""
    gateways: frozenset[str]
    """Names of its gateways, in their certificates."""
    pools: Mapping[str, tuple[str, int]]
    """Host and port of its pool nodes, by their names."""
    tokens_per_s: int | None = None
    """Prompt tokens that are computed for it, a second; None is no limit."""
    queued_max: int = 256
    """Requests that wait at the proxy; more are refused."""
    connections_max: int = 1024
    """Connections of its gateways to the proxy; more are refused."""
    memory: Share = field(default_factory=Share)
    """Its reserve and limit in the memory of each pool node."""
    link_bits_per_s: int = 0
    """Rate of all links of one pool node to it, bits per second; 0 is no limit."""

    @property
    def link_budget(self) -> int:
        """Rate of the link to one of its pool nodes, bits per second; 0 is no limit."""
        return self.link_bits_per_s // max(1, len(self.pools))


class Contracts:
    """All contracts in force, by site, gateway and pool node.

    Args:
        contracts: Names of sites, gateways and pool nodes are unique.
    """

    def __init__(self, contracts: Iterable[Contract] = ()) -> None:
        self.by_site = {each.site: each for each in contracts}
        self.site_of_gateway = {
            name: site for site, each in self.by_site.items() for name in each.gateways
        }
        self.site_of_pool = {
            name: site for site, each in self.by_site.items() for name in each.pools
        }

    def site_of(self, name: str) -> str | None:
        """Site of a gateway or a pool node; None for a part of no site."""
        return self.site_of_gateway.get(name) or self.site_of_pool.get(name)


TAGS_MAX = 10_000
"""Tags of one site: each costs about 100 bytes, and a line in the file that keeps them."""


class TagOwners:
    """Tags and the sites that own them.

    Args:
        owners: Sites by tag, as they were kept.
        tags_max: Of one site; further ones are not accepted.
    """

    def __init__(self, owners: Mapping[str, str] | None = None, tags_max: int = TAGS_MAX) -> None:
        self._owners = dict(owners or {})
        self._tags_max = tags_max
        self._counts: dict[str, int] = {}
        for site in self._owners.values():
            self._counts[site] = self._counts.get(site, 0) + 1

    def __getitem__(self, tag: str) -> str | None:
        return self._owners.get(tag)

    def __len__(self) -> int:
        return len(self._owners)

    def items(self) -> dict[str, str]:
        """All tags with their sites."""
        return dict(self._owners)

    def claim(self, tag: str, site: str) -> bool:
        """Use a tag for a site.

        Returns:
            False if the tag is empty, is another site's, or is one more than a site may have.
        """
        owner = self._owners.get(tag)
        if owner is not None:
            return owner == site
        count = self._counts.get(site, 0)
        if not tag or count >= self._tags_max:
            return False
        self._owners[tag], self._counts[site] = site, count + 1
        return True
