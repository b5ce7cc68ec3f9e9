"""The keep room of a pool node: what gateways order about the blocks that it keeps."""

from __future__ import annotations

from prfaas.core.facts import FactStream
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.aging import Aging
from prfaas.pool.node.link_room import LinkRoom
from prfaas.pool.node.own_site import OwnSite
from prfaas.pool.node.prefix_pinning import PrefixPinning
from prfaas.pool.node.purging import Purging
from prfaas.pool.node.store_room import StoreRoom
from prfaas.pool.node.tenants import AnnouncedShares
from prfaas.wire.messages.gateway import Subscribe


class KeepRoom:
    """Purges, pins, maximum ages and shares at one pool node."""

    def __init__(
        self,
        site: OwnSite,
        facts: FactStream,
        metrics: PoolMetrics,
        store: StoreRoom,
        links: LinkRoom,
    ) -> None:
        settings = site.settings
        self._shares = None if site.is_shared else AnnouncedShares(store.share)
        self.pinning = PrefixPinning(store.memory, links.layouts, settings.clock_ns)
        self.aging = Aging(
            store.memory,
            store.disk,
            store.shared,
            site.claims,
            metrics,
            settings.wall_s,
            settings.age_round_s,
        )
        self.purging = Purging(
            settings.name,
            store.memory,
            store.disk,
            store.shared,
            links.inbound,
            links.links,
            metrics,
            settings.clock_ns,
            facts,
            settings.purge_bar_ns,
            settings.wall_s,
        )

    def announced(self, gateway: str, message: Subscribe) -> None:
        """A gateway has subscribed, with ages and shares of tenants."""
        self.aging.announced(gateway, message)
        if self._shares is not None:
            self._shares.announced(gateway, message)

    def expire(self) -> None:
        """End bars and pins whose time is over."""
        self.purging.expire()
        self.pinning.expire()
