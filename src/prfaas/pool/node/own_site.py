"""The parts that a pool node knows, and what they may do: those of its own site, everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography import x509

from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.tenant_shares import Share, TenantShares
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.event_feed import EventFeed
from prfaas.wire.allow_list import AllowList
from prfaas.wire.identity import LinkContexts
from prfaas.wire.messages.base import Message

Peer = tuple[tuple[str, int], int]
"""Address of a pool node, and the budget of the link to it in bits per second; 0 is none."""


@dataclass(frozen=True, slots=True)
class ChangedParts:
    """Parts of other sites after a change of contracts."""

    gone: frozenset[str]
    """Names whose connections end: parts without a contract, or with another authority."""
    came: Mapping[str, Peer]
    """Pool nodes to connect to."""
    budgets: Mapping[str, int]
    """Budgets of all other links to pool nodes of sites, bits per second; 0 is none."""


class OwnSite:
    """A pool node that one site uses. An annex extends it to sites that share it by contract."""

    is_shared = False
    """True if other sites use the pool node as well."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.feed = EventFeed(settings.feed)
        """Events for gateways."""
        self.gateways = AllowList(settings.gateways, self.prove)
        """Gateways that may subscribe and sign."""
        self.sources = AllowList(settings.sources, self.prove)
        """Pools that may push."""
        self.hosts = AllowList(settings.hosts, self.prove)
        """Pools of other hosts of the site."""

    def attach(self, store: BlockStore) -> None:
        """Use the blocks of a store to tell whose they are."""

    def follow(self, facts: FactStream) -> None:
        """Guard the use of tickets, and follow transfers."""

    def order_of(self, capacity_bytes: int) -> TenantShares[BlockName]:
        """Order of eviction of a memory of that size: tenants have shares."""
        return TenantShares(LeastRecentlyUsed(), capacity_bytes)

    @property
    def shares(self) -> Mapping[str, Share]:
        """Shares of memory by site."""
        return {}

    @property
    def peers(self) -> dict[str, Peer]:
        """Pool nodes to push to at the start."""
        return {name: (address, 0) for name, address in self.settings.peers.items()}

    def site_of(self, name: str) -> str | None:
        """Site of a gateway or pool node; None for one of this site."""

    def prove(self, name: str, der: bytes | None) -> None:
        """See that a certificate can prove the name of a part.

        Raises:
            PeerError: The authority of another site signed it.
        """

    def allows(self, gateway: str, message: Message, answer: Callable[[Message], None]) -> bool:
        """Return True if a gateway may send a message; otherwise it is answered, or ignored."""
        return True

    def claims(self, gateway: str, tag: str) -> bool:
        """Return True if a gateway may say something about all blocks of a tag."""
        return True

    def certificates(self) -> list[x509.Certificate]:
        """Certificates of the authorities of other sites."""
        return []

    def trust(
        self,
        dialling: LinkContexts,
        accepting: LinkContexts,
        on_io: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """Have both ends of links accept certificates of other sites.

        Args:
            on_io: Runs a function on the thread of data connections.
        """

    def look(self) -> ChangedParts | None:
        """Read the contracts anew if their file changed; None if nothing has."""
