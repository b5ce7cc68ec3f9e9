"""The loops beside the short-term one, as a deployment file asks for them."""

from __future__ import annotations

from prfaas.config.deployment import Deployment
from prfaas.core.control.split import Split
from prfaas.core.facts import FactStream
from prfaas.core.request.facts import RequestEnded
from prfaas.errors import ConfigError
from prfaas.gateway.loops.replication import PrefixReplication, copy_settings
from prfaas.gateway.loops.role_rebalancing import Reroling
from prfaas.gateway.loops.ticker import BEAT_S, LOOP_EVERY, PeriodicLoop
from prfaas.gateway.pools.transfer_orders import Fetcher
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.profiles import Profiles
from prfaas.gateway.routing.transfer_tracker import Transfers, TransferView


class Loops:
    """The long-term loop, and replication.

    Raises:
        ConfigError: The plan is one of another deployment.
    """

    def __init__(
        self,
        deployment: Deployment,
        driver: Driver,
        fetcher: Fetcher,
        transfers: Transfers,
        profiles: Profiles,
        journal: Journal,
        facts: FactStream,
    ) -> None:
        self.copier: PrefixReplication | None = None
        if deployment.routing.replication is not None:
            settings = copy_settings(deployment.routing, BEAT_S * LOOP_EVERY)
            self.copier = PrefixReplication(driver, transfers, fetcher, settings, journal)
        self.reroling: Reroling | None = None
        if driver.split is not None and deployment.routing.reroling:
            _check_size(deployment, driver.split, profiles)
            self.reroling = Reroling(driver, driver.split, journal)
            facts.subscribe(RequestEnded, self.reroling.ended)

    @property
    def all(self) -> list[PeriodicLoop]:
        """Running loops."""
        return [loop for loop in (self.reroling, self.copier) if loop is not None]

    def transfer_over(self, transfer: TransferView) -> None:
        """A transfer ended at its destination."""
        if self.copier is not None:
            self.copier.over(transfer)


def _check_size(deployment: Deployment, split: Split, profiles: Profiles) -> None:
    if len(split.names) != profiles.num_local:
        raise ConfigError(
            f"routing.reroling: there are {len(split.names)} PD engines, and the plan has "
            f"{profiles.num_local} PD instances; set `instances` of [pd] in "
            f"{deployment.routing.plan} to what there is"
        )
