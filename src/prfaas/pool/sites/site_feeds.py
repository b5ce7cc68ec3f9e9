"""Events for the gateways of several sites: each learns of its own blocks, transfers and links."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.membership.agreements import Agreements
from prfaas.pool.store.event_feed import EventFeed, FeedLimits, Names
from prfaas.wire.channel import Channel
from prfaas.wire.messages.gateway import PoolState, TierUse, TransferEnded

HOST = "host"


class _NamesOf:
    """Names of the blocks of one site in a store."""

    def __init__(self, store: Names, sites: dict[BlockName, str], site: str) -> None:
        self._store, self._sites, self._site = store, sites, site

    def names(self) -> Iterator[BlockName]:
        """See `BlockStore.names`."""
        return (name for name in self._store.names() if self._sites.get(name) == self._site)


class SiteFeeds(EventFeed):
    """The feed of the own site, which gets everything, and one for each other site.

    Each has numbers of its own, so that gaps reveal nothing of others.

    Args:
        limits: On events for one subscriber.
        site_of_block: Site that owns a block; None for a block of no site.
        held_bytes: Memory that blocks of a site take.
    """

    def __init__(
        self,
        limits: FeedLimits,
        agreements: Agreements,
        site_of_block: Callable[[BlockName], str | None],
        held_bytes: Callable[[str], int],
    ) -> None:
        super().__init__(limits)
        self._agreements = agreements
        self._site_of, self._held_bytes = site_of_block, held_bytes
        self._feeds: dict[str, EventFeed] = {}
        self._sites: dict[BlockName, str] = {}
        """Site of each block that belongs to one."""
        self._counts: dict[str, int] = {}
        self._told: dict[str, PoolState] = {}
        """State as last sent to the gateways of each site."""

    def site_of_block(self, name: BlockName) -> str | None:
        """The site of a block; None for one of no site, or that is not here."""
        return self._sites.get(name)

    # --- subscribers ---

    def subscribe(self, channel: Channel, store: Names, state: Callable[[], PoolState]) -> None:
        """See `EventFeed.subscribe`."""
        site = self._agreements.contracts.site_of_gateway.get(channel.peer)
        if site is None:
            super().subscribe(channel, store, state)
            return
        if site not in self._feeds:
            feed = self._feeds[site] = EventFeed(self._limits)
            feed.epoch = self.epoch
        names = _NamesOf(store, self._sites, site)
        self._feeds[site].subscribe(channel, names, lambda: self._view(state(), site))

    @property
    def num_subscribers(self) -> int:
        """Subscribed gateways."""
        others = sum(feed.num_subscribers for feed in self._feeds.values())
        return super().num_subscribers + others

    def unsubscribe(self, channel: Channel) -> None:
        """Remove a subscriber."""
        super().unsubscribe(channel)
        for site, feed in list(self._feeds.items()):
            feed.unsubscribe(channel)
            if not feed.num_subscribers:
                del self._feeds[site]
                self._told.pop(site, None)

    # --- StoreObserver ---

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks came."""
        super().stored(layout_id, keys)
        by_site: dict[str, list[BlockKey]] = {}
        for key in keys:
            name = layout_id, key
            site = self._site_of(name)
            if site is not None:
                if name not in self._sites:
                    self._counts[site] = self._counts.get(site, 0) + 1
                self._sites[name] = site
                by_site.setdefault(site, []).append(key)
        for site, some in by_site.items():
            if site in self._feeds:
                self._feeds[site].stored(layout_id, some)

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks went."""
        super().evicted(layout_id, keys)
        by_site: dict[str, list[BlockKey]] = {}
        for key in keys:
            site = self._sites.pop((layout_id, key), None)
            if site is not None:
                self._counts[site] -= 1
                by_site.setdefault(site, []).append(key)
        for site, some in by_site.items():
            if site in self._feeds:
                self._feeds[site].evicted(layout_id, some)

    # --- other events ---

    def transfer_ended(self, event: TransferEnded) -> None:
        """A transfer ended: the gateways of the site at its other end are told."""
        site = self._agreements.contracts.site_of_pool.get(event.peer)
        super().transfer_ended(msgspec.structs.replace(event))
        if site is not None and site in self._feeds:
            self._feeds[site].transfer_ended(event)

    def state_changed(self, state: PoolState) -> None:
        """Something changed; a site is told only if what it may know did."""
        for site, feed in self._feeds.items():
            view = self._view(state, site)
            bare = msgspec.structs.replace(view, facts=[])
            if bare != self._told.get(site):
                self._told[site] = bare
                feed.state_changed(view)
        super().state_changed(state)

    def _view(self, state: PoolState, site: str) -> PoolState:
        """The state as the gateways of a site may know it."""
        contracts = self._agreements.contracts
        pools = {name for name, owner in contracts.site_of_pool.items() if owner == site}
        contract, host = contracts.by_site.get(site), state.tiers.get(HOST)
        tiers: dict[str, TierUse] = {}
        if contract is not None and host is not None:
            tiers[HOST] = TierUse(
                used_bytes=self._held_bytes(site),
                capacity_bytes=int(contract.memory.limit * host.capacity_bytes),
                num_blocks=self._counts.get(site, 0),
            )
        return msgspec.structs.replace(
            state,
            links={peer: is_up for peer, is_up in state.links.items() if peer in pools},
            telemetry={peer: each for peer, each in state.telemetry.items() if peer in pools},
            tiers=tiers,
            tenants={},
            num_leased=0,
            leased_bytes=0,
        )
