"""The market of a deployment or a scenario, from price tables and a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prfaas.config.market.prices import PriceStep, PriceTable
from prfaas.core.market.choice import PlannedSite, Revocation, SitePrice, Tariff, flat
from prfaas.core.market.market import HYSTERESIS, Market
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    import datetime

    from prfaas.planner.problem import PdCluster, PrfaasCluster

_MICROSECONDS = 1_000_000


NO_TABLE = PriceTable()


def planned_site(cluster: PrfaasCluster | PdCluster) -> PlannedSite:
    """A cluster of a plan."""
    link = getattr(cluster, "link", None)
    found = PlannedSite(cluster.gpus_per_instance, cluster.price_per_gpu_h)
    if link is None:
        return found
    return found._replace(per_tb=link.price_per_tb, rtt_ns=round(link.rtt_s * NS_PER_S))


def make_market(
    sites: Mapping[str, PlannedSite],
    tables: Mapping[str, PriceTable],
    hysteresis: float,
    wall_ns: int = 0,
) -> Market:
    """Make a market.

    Args:
        sites: All clusters of the plan.
        tables: Prices that take precedence over the plan's.
        hysteresis: As in `core.market.choice.choose`.
        wall_ns: Time since 1970 at 0 of the caller's clock, ns.
    """
    market = Market({}, hysteresis, wall_ns)
    for name, site in sites.items():
        apply(market, name, site, tables.get(name, NO_TABLE))
    return market


@dataclass(frozen=True)
class MarketPlan:
    """A market that a simulated run starts with; its clock starts at midnight."""

    sites: Mapping[str, PlannedSite]
    """All clusters of the plan."""
    tables: Mapping[str, PriceTable]
    """Prices that take precedence over the plan's."""
    hysteresis: float = HYSTERESIS
    """As in `core.market.choice.choose`."""
    revocations: Mapping[str, Sequence[Revocation]] = field(default_factory=dict)

    def make(self, policy: PolicyName) -> Market | None:
        """The market of a run; None where neither prices nor the policy ask for one."""
        if not self.tables and policy is not PolicyName.COST:
            return None
        market = make_market(self.sites, self.tables, self.hysteresis)
        for name, revoked in self.revocations.items():
            market.revoke(name, *revoked)
        return market


def apply(market: Market, name: str, site: PlannedSite, table: PriceTable) -> None:
    """Set prices and revocation of a cluster to those of its table."""
    market.set_price(name, site_price(site, table))
    market.revoke(name, *_revoked(table, market.wall_ns))


def site_price(site: PlannedSite, table: PriceTable) -> SitePrice:
    """Prices of a cluster: the table's, else the plan's."""
    return SitePrice(
        _tariff(table.gpu_hour, site.gpu_hour),
        _tariff(table.per_tb, site.per_tb),
        site.gpus,
        table.notice,
        _tariff(table.gb_hour, 0.0),
        table.watts,
    )


def _tariff(given: float | list[PriceStep] | None, planned: float) -> Tariff:
    if isinstance(given, list):
        starts_ns = tuple(step.at_s * NS_PER_S for step in given)
        return Tariff(starts_ns, tuple(step.price for step in given))
    return flat(planned if given is None else given)


def _revoked(table: PriceTable, wall_ns: int) -> list[Revocation]:
    if table.leaves_at is None:
        return []
    back = table.returns_at
    leaves_ns = _unix_ns(table.leaves_at) - wall_ns
    until_ns = None if back is None else _unix_ns(back) - wall_ns
    # It is in the file: the notice has been given.
    return [Revocation(-(2**63), leaves_ns, until_ns)]


def _unix_ns(at: datetime.datetime) -> int:
    return round(at.timestamp() * _MICROSECONDS) * 1000
