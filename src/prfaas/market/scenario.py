"""The market of a simulated run, from the tables of a scenario."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from prfaas.config.market.prices import PriceTable, check_prices
from prfaas.core.market.choice import Revocation
from prfaas.errors import ConfigError
from prfaas.market.make import MarketPlan, planned_site
from prfaas.planner.answer.plan_file import Seconds
from prfaas.planner.problem import Problem
from prfaas.units import NS_PER_S


class RevocationTable(BaseModel):
    """`[[revocation]]`: capacity of a PrfaaS cluster leaves after a notice, and returns."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    cluster: str
    """The cluster, by its name in the plan."""
    at: Seconds
    """It is gone from here on."""
    duration: Annotated[Seconds, Field(gt=0)]
    """Time until it is back."""
    notice: Seconds
    """Time from the notice until it is gone."""

    @property
    def times_ns(self) -> tuple[int, int, int]:
        """Times of the notice, of the revocation, and of the return, ns."""
        times = self.at - self.notice, self.at, self.at + self.duration
        known_ns, at_ns, until_ns = (round(at * NS_PER_S) for at in times)
        return known_ns, at_ns, until_ns


def make_market_plan(
    prices: Mapping[str, PriceTable],
    revocations: Sequence[RevocationTable],
    hysteresis: float,
    problem: Problem,
) -> MarketPlan:
    """Prices and revocations of a scenario; ConfigError if one is that of no cluster, or has a
    date."""
    remote = {cluster.name: planned_site(cluster) for cluster in problem.prfaas}
    sites = {problem.pd.name: planned_site(problem.pd), **remote}
    try:
        check_prices(prices, sites)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name, table in prices.items():
        if table.leaves_at is not None:
            raise ConfigError(
                f"prices.{name}.leaves_at: a simulated run has no date; use [[revocation]]"
            )
    _check(revocations, remote)
    found: dict[str, list[Revocation]] = {}
    for each in sorted(revocations, key=lambda each: each.at):
        found.setdefault(each.cluster, []).append(Revocation(*each.times_ns))
    return MarketPlan(sites, prices, hysteresis, found)


def _check(revocations: Sequence[RevocationTable], clusters: Collection[str]) -> None:
    for table in revocations:
        if table.cluster not in clusters:
            known = ", ".join(clusters) or "none"
            raise ConfigError(f"revocation of cluster {table.cluster!r}: there are {known}")
