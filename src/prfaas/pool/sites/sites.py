"""The sites that share a pool node, or none: then everything is allowed."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from cryptography import x509

from prfaas.core.admission.contracts import Contracts
from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.keep_rules import Origin
from prfaas.core.cache.tenant_shares import OwnedShares, Share, TenantShares
from prfaas.core.kv.blocks import BlockName
from prfaas.core.kv.shipping import Manifest
from prfaas.core.transfer.tickets import Ticket
from prfaas.errors import ConfigError
from prfaas.membership.agreements import Agreements
from prfaas.pool.sites.site_feeds import SiteFeeds
from prfaas.pool.sites.site_rules import SiteRules
from prfaas.pool.store.event_feed import EventFeed, FeedLimits
from prfaas.wire.allow_list import AllowList
from prfaas.wire.identity import LinkContexts
from prfaas.wire.messages.base import Message

Peer = tuple[tuple[str, int], int]
"""Address of a pool node, and the budget of the link to it in bits per second."""


class SitesSettings(Protocol):
    """The settings of a pool node that sites depend on; see `PoolSettings`."""

    @property
    def contracts(self) -> Path | None:
        """Contracts file."""

    @property
    def disk(self) -> Path | None:
        """Folder of the disk tier."""

    @property
    def peers(self) -> dict[str, tuple[str, int]]:
        """Pools of the site itself."""

    @property
    def gateways(self) -> frozenset[str]:
        """Gateways of the site itself."""

    @property
    def feed(self) -> FeedLimits:
        """Limits on events for a gateway."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Parts of sites after a change of contracts.

    Attributes:
        gone: Names whose connections end: parts without a contract, or with another authority.
        came: Pool nodes to connect to.
        budgets: Budgets of all other links to pool nodes of sites, bits per second; 0 is none.
    """

    gone: frozenset[str]
    came: Mapping[str, Peer]
    budgets: Mapping[str, int]


class _Part(NamedTuple):
    """Conditions of a connection: a gateway has no address."""

    site: str
    authorities: frozenset[bytes]
    address: tuple[str, int] | None = None

    def holds_in(self, new: _Part | None) -> bool:
        """Return True if a connection may go on; a further authority does not end it."""
        return (
            new is not None
            and (new.site, new.address) == (self.site, self.address)
            and self.authorities <= new.authorities
        )


class Sites:
    """Contracts at one pool node.

    Args:
        settings: Of the pool node.
        origin_of: Origin of a block that is here; None if it is not.
        held_bytes: Memory of each site's blocks.

    Raises:
        ConfigError: The contracts file cannot be used, or names a part of the site itself.
    """

    def __init__(
        self,
        settings: SitesSettings,
        origin_of: Callable[[BlockName], Origin | None],
        held_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._settings, self._origin_of = settings, origin_of
        self.owner_of: Callable[[str], str | None] | None = None
        """Site that a tag belongs to; None without contracts."""
        self._agreements: Agreements | None = None
        self._rules: SiteRules | None = None
        self.feed: EventFeed | SiteFeeds
        """Events for gateways."""
        if settings.contracts is None:
            self.feed = EventFeed(settings.feed)
        else:
            self._agreements = agreements = Agreements(
                settings.contracts, settings.disk, self._check
            )
            self.owner_of = agreements.owners.__getitem__
            self.feed = SiteFeeds(
                settings.feed,
                lambda: agreements.contracts,
                self._site_of_block,
                lambda site: held_bytes().get(site, 0),
            )
            self._rules = SiteRules(agreements, self.feed.site_of)
        self.gateways = AllowList(self._all_gateways(), self.prove)
        """Names of all gateways that may subscribe and sign."""
        self._parts = self._current()

    @property
    def is_shared(self) -> bool:
        """Return True if there is a contracts file."""
        return self._agreements is not None

    @property
    def contracts(self) -> Contracts:
        """Those in force."""
        return self._agreements.contracts if self._agreements is not None else Contracts()

    def order_of(self, capacity_bytes: int) -> TenantShares[BlockName]:
        """Order of eviction of a memory of that size: sites have shares, or else tenants."""
        rest = LeastRecentlyUsed[BlockName]()
        if self.owner_of is None:
            return TenantShares(rest, capacity_bytes)
        return OwnedShares(rest, capacity_bytes, self.owner_of)

    @property
    def shares(self) -> Mapping[str, Share]:
        """Shares of memory by site."""
        return self._agreements.shares if self._agreements is not None else {}

    @property
    def peers(self) -> dict[str, Peer]:
        """Pool nodes to push to: those of the site itself, and of all other sites."""
        own = {name: (address, 0) for name, address in self._settings.peers.items()}
        return own | self._of_sites()

    def _of_sites(self) -> dict[str, Peer]:
        return {
            name: (address, contract.link_budget)
            for contract in self.contracts.by_site.values()
            for name, address in contract.pools.items()
        }

    def site_of_gateway(self, gateway: str) -> str | None:
        """Site of a gateway; None for one of this site."""
        return self.contracts.site_of_gateway.get(gateway)

    # --- rules ---

    def prove(self, name: str, der: bytes | None) -> None:
        """See that a certificate can prove the name of a part.

        Raises:
            PeerError: The authority of another site, or of this one, signed it.
        """
        if self._agreements is not None:
            self._agreements.authorities.site_of(name, der)

    def check_ticket(self, ticket: Ticket, peer: str, blocks: Manifest) -> None:
        """See `SiteRules.ticket`."""
        if self._rules is not None:
            self._rules.ticket(ticket, peer, blocks)

    def allows(self, gateway: str, message: Message, answer: Callable[[Message], None]) -> bool:
        """See `SiteRules.allows`."""
        return self._rules is None or self._rules.allows(gateway, message, answer)

    def claims(self, gateway: str, tag: str) -> bool:
        """Return True if a gateway may say something about all blocks of a tag."""
        site = self.site_of_gateway(gateway)
        if self._agreements is None or site is None:
            return True
        return self._agreements.claim(tag, site)

    def ended(self, transfer_id: bytes) -> None:
        """A transfer is over."""
        if self._rules is not None:
            self._rules.ended(transfer_id)

    # --- trust ---

    def certificates(self) -> list[x509.Certificate]:
        """Certificates of the authorities of all sites."""
        return [] if self._agreements is None else self._agreements.authorities.certificates

    def trust(
        self,
        dialling: LinkContexts,
        accepting: LinkContexts,
        on_io: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """Have both ends of links accept certificates of all sites.

        Args:
            dialling: Contexts of the dialling end.
            accepting: Contexts of the accepting end.
            on_io: Runs a function on the thread of data connections.
        """
        if self._agreements is None:
            return
        authorities = self._agreements.authorities
        authorities.trust(dialling.messages, accepting.messages)
        data: list[ssl.SSLContext] = []
        for ends in (dialling, accepting):
            data += [ends.data, ends.probe]
        on_io(partial(authorities.trust, *data))

    # --- changes ---

    def look(self) -> Changed | None:
        """Read the contracts anew if their file changed; None if nothing has."""
        if self._agreements is None or not self._agreements.look():
            return None
        before, self._parts = self._parts, self._current()
        self.gateways.replace(self._all_gateways())
        gone = {name for name, part in before.items() if not part.holds_in(self._parts.get(name))}
        came, budgets = dict[str, Peer](), dict[str, int]()
        for name, peer in self._of_sites().items():
            if name not in before or name in gone:
                came[name] = peer
            else:
                budgets[name] = peer[1]
        return Changed(frozenset(gone), came, budgets)

    def _current(self) -> dict[str, _Part]:
        """Conditions of a connection of each part of a site."""
        if self._agreements is None:
            return {}
        authorities, parts = self._agreements.authorities, dict[str, _Part]()
        for site, contract in self.contracts.by_site.items():
            keys = authorities.keys_of(site)
            parts |= {name: _Part(site, keys) for name in contract.gateways}
            parts |= {name: _Part(site, keys, at) for name, at in contract.pools.items()}
        return parts

    def _all_gateways(self) -> frozenset[str]:
        return self._settings.gateways | self.contracts.site_of_gateway.keys()

    def _check(self, contracts: Contracts) -> None:
        own = {*self._settings.gateways, *self._settings.peers}
        if both := sorted(name for name in own if contracts.site_of(name)):
            raise ConfigError(
                f"{', '.join(both)} is a part of this site, and of one in its contracts; names are "
                "identities: rename one"
            )

    def _site_of_block(self, name: BlockName) -> str | None:
        origin = self._origin_of(name)
        return None if origin is None or self.owner_of is None else self.owner_of(origin.tenant)
