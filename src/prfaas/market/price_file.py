"""A price file that is read again when it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prfaas.config.deployment import Deployment
from prfaas.config.market.prices import PriceFile, PriceTable, check_prices
from prfaas.core.market.choice import PlannedSite
from prfaas.core.market.market import Market
from prfaas.core.routing.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.market.make import NO_TABLE, apply, make_market
from prfaas.toml_tables import read_toml, validated

FILE_BYTES_MAX = 1 << 20
Stamp = tuple[int, int, int]
Note = Callable[[str, str], None]
"""Remembers an action and its reason."""


def read_prices(path: Path, clusters: Mapping[str, object]) -> dict[str, PriceTable]:
    """Read a price file.

    Args:
        clusters: Clusters that exist, by name.

    Raises:
        ConfigError: It cannot be read or is invalid; the message has key and reason.
    """
    found = validated(PriceFile, read_toml(path, FILE_BYTES_MAX), path)
    try:
        check_prices(found.prices, clusters)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return found.prices


def deployment_market(deployment: Deployment, sites: Mapping[str, PlannedSite]) -> Market | None:
    """The market of a deployment; None where nothing asks for one; ConfigError if the price file is
    invalid.

    Args:
        sites: Clusters of its plan.
    """
    routing, tables = deployment.routing, deployment.prices
    if routing.price_file is not None:
        tables = tables | read_prices(routing.price_file, sites)
    if not tables and routing.policy is not PolicyName.COST:
        return None
    wall_ns = time.time_ns() - time.monotonic_ns()
    return make_market(sites, tables, routing.price_hysteresis, wall_ns)


class MarketClock:
    """Keeps a market at the time of day, and at the prices of its file. A loop of the gateway.

    A file that cannot be read leaves the prices as they are.

    Args:
        sites: Clusters of the plan.
        tables: Prices of the deployment file.
        path: The price file; None without.
    """

    turns_each_beat = False

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        market: Market | None,
        sites: Mapping[str, PlannedSite],
        note: Note,
    ) -> MarketClock | None:
        """The clock of a deployment's market; None without a market."""
        if market is None:
            return None
        path = deployment.routing.price_file
        return cls(market, sites, deployment.prices, path, note)

    def __init__(
        self,
        market: Market,
        sites: Mapping[str, PlannedSite],
        tables: Mapping[str, PriceTable],
        path: Path | None,
        note: Note,
    ) -> None:
        self._market, self._sites, self._tables = market, sites, dict(tables)
        self._path, self._note = path, note
        self._stamp: Stamp | None = None
        self.fault = ""
        """Reason why the file was not read; "" while it was."""

    def beat(self, now_ns: int) -> None:
        """Follow the wall clock, which may be set, and the file."""
        self._market.wall_ns = time.time_ns() - now_ns
        if self._path is not None:
            self._look(self._path)

    def turn(self, now_ns: int) -> None:
        """Nothing: prices follow at each beat."""

    def _look(self, path: Path) -> None:
        try:
            found = path.stat()
            stamp = found.st_mtime_ns, found.st_size, found.st_ino
        except OSError as error:
            self._failed(f"{path} cannot be read: {error.strerror}")
            return
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            tables = read_prices(path, self._sites)
        except ConfigError as error:
            self._failed(str(error))
            return
        self.fault = ""
        for name, site in self._sites.items():
            table = tables.get(name, self._tables.get(name, NO_TABLE))
            apply(self._market, name, site, table)
        self._note("read", f"{path} was read")

    def _failed(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            self._note("kept", f"prices stay as they are: {fault}")
