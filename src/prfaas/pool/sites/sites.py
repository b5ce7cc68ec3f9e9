"""The sites that share a pool node by contract, and what their gateways and pool nodes may do."""

from __future__ import annotations

import ssl
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from prfaas.core.admission.contracts import Contracts
from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.keep_rules import Effect
from prfaas.core.cache.tenant_shares import OwnedShares, Share, TenantShares
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, BlockName
from prfaas.core.transfer.facts import TicketUse, TransferDone
from prfaas.core.transfer.tickets import TicketRefusal, TicketRefusedError
from prfaas.errors import ConfigError
from prfaas.membership.agreements import Agreements
from prfaas.pool.node.own_site import ChangedParts, OwnSite, Peer
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.sites.site_feeds import SiteFeeds
from prfaas.pool.store.block_store import BlockStore
from prfaas.wire.identity import LinkContexts
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.comparing import Compare
from prfaas.wire.messages.gateway import LinkLease, Order, OrderDone
from prfaas.wire.messages.link import Abort, Release

TRANSFERS_MAX = 100_000
"""Transfers whose site is remembered; the oldest is forgotten first."""
NOT_YOURS = "a gateway of a site that shares this pool node purges its own tenants, one by one"
NO_PINS = "a gateway of a site that shares this pool node pins nothing: its reserve protects it"


class SiteRules:
    """Checks requests of sites against the contracts.

    Args:
        agreements: Contracts and owners of tags.
        site_of_block: Site of a block that is here; None without.
    """

    def __init__(
        self, agreements: Agreements, site_of_block: Callable[[BlockName], str | None]
    ) -> None:
        self._agreements, self._site_of_block = agreements, site_of_block
        self._transfers: OrderedDict[bytes, str | None] = OrderedDict()

    def may_use(self, use: TicketUse) -> None:
        """Check a ticket whose signature is valid; TicketRefusedError if it is for parts, tenants
        or blocks of another site."""
        ticket, peer, blocks = use.ticket, use.peer, use.blocks
        contracts = self._agreements.contracts
        site = contracts.site_of_gateway.get(ticket.signer)
        if contracts.site_of_pool.get(peer) != site:
            raise TicketRefusedError(
                TicketRefusal.SITE,
                f"{ticket.signer} may not sign for {peer}, a part of another site",
            )
        if site is not None and not self._agreements.claim(ticket.tenant, site):
            raise TicketRefusedError(
                TicketRefusal.SITE,
                f"{ticket.signer} names no tag, one of another site, or too many",
            )
        for group, hashes in blocks.items() if site is not None else ():
            for at in range(0, len(hashes), HASH_BYTES):
                key = BlockKey(group, hashes[at : at + HASH_BYTES])
                if self._site_of_block((ticket.layout_id, key)) not in (None, site):
                    raise TicketRefusedError(TicketRefusal.SITE, "it names a block of another site")
        self._transfers[ticket.transfer_id] = site
        if len(self._transfers) > TRANSFERS_MAX:
            self._transfers.popitem(last=False)

    def ended(self, fact: TransferDone) -> None:
        """A transfer is over."""
        self._transfers.pop(fact.transfer.transfer_id, None)

    def allows(self, gateway: str, message: Message, answer: Callable[[Message], None]) -> bool:
        """Return True if a gateway may send a message; otherwise it is answered, or ignored."""
        site = self._agreements.contracts.site_of_gateway.get(gateway)
        if site is None:
            return True
        match message:
            case Abort() | Release():
                return self._transfers.get(message.transfer_id, site) == site
            case Order(tenant=tag):
                is_purge = message.effect == Effect.PURGE
                # A source is a pool node, which other sites use as well.
                is_own = tag is not None and not message.source
                if is_purge and is_own and self._agreements.claim(tag or "", site):
                    return True
                problem = NOT_YOURS if is_purge else NO_PINS
                answer(OrderDone(job=message.job, problem=problem))
                return False
        return not isinstance(message, Compare | LinkLease)


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


class Sites(OwnSite):
    """Contracts at one pool node.

    Args:
        contracts: File that is followed.

    Raises:
        ConfigError: The contracts file cannot be used, or names a part of the site itself.
    """

    is_shared = True
    _store: BlockStore

    def __init__(self, settings: PoolSettings, contracts: Path) -> None:
        super().__init__(settings)
        self._agreements = agreements = Agreements(contracts, settings.disk, self._check)
        self.feed = feeds = SiteFeeds(
            settings.feed,
            agreements,
            self._site_of_block,
            lambda site: self._store.room.held_bytes.get(site, 0),
        )
        self._rules = SiteRules(agreements, feeds.site_of_block)
        self.gateways.replace(self._all_gateways())
        self._parts = self._current()

    def attach(self, store: BlockStore) -> None:
        """See `OwnSite.attach`."""
        self._store = store

    def follow(self, facts: FactStream) -> None:
        """See `OwnSite.follow`."""
        facts.guard(TicketUse, self._rules.may_use)
        facts.subscribe(TransferDone, self._rules.ended)

    @property
    def contracts(self) -> Contracts:
        """Those in force."""
        return self._agreements.contracts

    def order_of(self, capacity_bytes: int) -> TenantShares[BlockName]:
        """See `OwnSite.order_of`; sites have shares, not tenants."""
        owner_of = self._agreements.owners.__getitem__
        return OwnedShares(LeastRecentlyUsed(), capacity_bytes, owner_of)

    @property
    def shares(self) -> Mapping[str, Share]:
        """Shares of memory by site."""
        return self._agreements.shares

    @property
    def peers(self) -> dict[str, Peer]:
        """Pool nodes to push to: those of the site itself, and of all other sites."""
        return super().peers | self._of_sites()

    def _of_sites(self) -> dict[str, Peer]:
        return {
            name: (address, contract.link_budget)
            for contract in self.contracts.by_site.values()
            for name, address in contract.pools.items()
        }

    def site_of(self, name: str) -> str | None:
        """See `OwnSite.site_of`."""
        return self.contracts.site_of(name)

    # --- rules ---

    def prove(self, name: str, der: bytes | None) -> None:
        """See that a certificate can prove the name of a part.

        Raises:
            PeerError: The authority of another site, or of this one, signed it.
        """
        self._agreements.authorities.site_of(name, der)

    def allows(self, gateway: str, message: Message, answer: Callable[[Message], None]) -> bool:
        """See `SiteRules.allows`."""
        return self._rules.allows(gateway, message, answer)

    def claims(self, gateway: str, tag: str) -> bool:
        """Return True if a gateway may say something about all blocks of a tag."""
        site = self.contracts.site_of_gateway.get(gateway)
        return site is None or self._agreements.claim(tag, site)

    # --- trust ---

    def certificates(self) -> list[x509.Certificate]:
        """Certificates of the authorities of all sites."""
        return self._agreements.authorities.certificates

    def trust(
        self,
        dialling: LinkContexts,
        accepting: LinkContexts,
        on_io: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """See `OwnSite.trust`."""
        authorities = self._agreements.authorities
        authorities.trust(dialling.messages, accepting.messages)
        data: list[ssl.SSLContext] = []
        for ends in (dialling, accepting):
            data += [ends.data, ends.probe]
        on_io(partial(authorities.trust, *data))

    # --- changes ---

    def look(self) -> ChangedParts | None:
        """Read the contracts anew if their file changed; None if nothing has."""
        if not self._agreements.look():
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
        return ChangedParts(frozenset(gone), came, budgets)

    def _current(self) -> dict[str, _Part]:
        """Conditions of a connection of each part of a site."""
        authorities, parts = self._agreements.authorities, dict[str, _Part]()
        for site, contract in self.contracts.by_site.items():
            keys = authorities.keys_of(site)
            parts |= {name: _Part(site, keys) for name in contract.gateways}
            parts |= {name: _Part(site, keys, at) for name, at in contract.pools.items()}
        return parts

    def _all_gateways(self) -> frozenset[str]:
        return self.settings.gateways | self.contracts.site_of_gateway.keys()

    def _check(self, contracts: Contracts) -> None:
        own = {*self.settings.gateways, *self.settings.peers}
        if both := sorted(name for name in own if contracts.site_of(name)):
            raise ConfigError(
                f"{', '.join(both)} is a part of this site, and of one in its contracts; names are "
                "identities: rename one"
            )

    def _site_of_block(self, name: BlockName) -> str | None:
        origin = self._store.origin_of(name)
        return None if origin is None else self._agreements.owners[origin.tenant]
