"""Events for the gateways of several sites: each learns of its own blocks, transfers and links."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import msgspec

from prfaas.core.admission.contracts import Contracts
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.store.event_feed import EventFeed, FeedLimits, Names
from prfaas.wire.channel import Channel
from prfaas.wire.messages.gateway import PoolState, TierUse, TransferEnded

OWN = ""
"""Site of the gateways that belong to the PrfaaS site itself: they see everything."""
HOST = "host"


class _NamesOf:
    """Names of the blocks of one site in a store."""

    def __init__(self, store: Names, sites: dict[BlockName, str], site: str) -> None:
        self._store, self._sites, self._site = store, sites, site

    def names(self) -> Iterator[BlockName]:
        """See `BlockStore.names`."""
        return (name for name in self._store.names() if self._sites.get(name) == self._site)


class SiteFeeds:
    """One feed for each site, with numbers of its own, so that gaps reveal nothing of others.

    Args:
        limits: On events for one subscriber.
        site_of_block: Site that owns a block; None for a block of no site.
        held_bytes: Memory that blocks of a site take.
    """

    def __init__(
        self,
        limits: FeedLimits,
        contracts: Callable[[], Contracts],
        site_of_block: Callable[[BlockName], str | None],
        held_bytes: Callable[[str], int],
    ) -> None:
        self._limits, self._contracts = limits, contracts
        self._site_of_block, self._held_bytes = site_of_block, held_bytes
        self.epoch = secrets.token_hex(8)
        self._feeds: dict[str, EventFeed] = {OWN: self._feed()}
        self._sites: dict[BlockName, str] = {}
        """Site of each block that belongs to one."""
        self._counts: dict[str, int] = {}
        self._told: dict[str, PoolState] = {}
        """State as last sent to the gateways of each site."""

    def site_of(self, name: BlockName) -> str | None:
        """The site of a block; None for one of no site, or that is not here."""
        return self._sites.get(name)

    # --- subscribers ---

    def subscribe(self, channel: Channel, store: Names, state: Callable[[], PoolState]) -> None:
        """See `EventFeed.subscribe`."""
        site = self._contracts().site_of_gateway.get(channel.peer, OWN)
        feed = self._feeds.get(site)
        if feed is None:
            feed = self._feeds[site] = self._feed()
        names = store if site == OWN else _NamesOf(store, self._sites, site)
        feed.subscribe(channel, names, lambda: self._view(state(), site))

    @property
    def num_subscribers(self) -> int:
        """Subscribed gateways."""
        return sum(feed.num_subscribers for feed in self._feeds.values())

    def unsubscribe(self, channel: Channel) -> None:
        """Remove a subscriber."""
        for site, feed in list(self._feeds.items()):
            feed.unsubscribe(channel)
            if site != OWN and not feed.num_subscribers:
                del self._feeds[site]
                self._told.pop(site, None)

    # --- StoreObserver ---

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks came."""
        self._feeds[OWN].stored(layout_id, keys)
        by_site: dict[str, list[BlockKey]] = {}
        for key in keys:
            name = layout_id, key
            site = self._site_of_block(name)
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
        self._feeds[OWN].evicted(layout_id, keys)
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
        site = self._contracts().site_of_pool.get(event.peer)
        self._feeds[OWN].transfer_ended(msgspec.structs.replace(event))
        if site is not None and site in self._feeds:
            self._feeds[site].transfer_ended(event)

    def state_changed(self, state: PoolState) -> None:
        """Something changed; a site is told only if what it may know did."""
        for site, feed in self._feeds.items():
            view = self._view(state, site)
            if site == OWN or msgspec.structs.replace(view, facts=[]) != self._told.get(site):
                self._told[site] = msgspec.structs.replace(view, facts=[])
                feed.state_changed(view)

    def _view(self, state: PoolState, site: str) -> PoolState:
        """The state as the gateways of a site may know it."""
        if site == OWN:
            return msgspec.structs.replace(state)
        contracts = self._contracts()
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

    def _feed(self) -> EventFeed:
        feed = EventFeed(self._limits)
        feed.epoch = self.epoch
        return feed
