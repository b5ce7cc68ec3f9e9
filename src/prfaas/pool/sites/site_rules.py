"""Rights of the gateways and pool nodes of a site at a shared pool node."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, BlockName
from prfaas.core.transfer.facts import TicketUse, TransferDone
from prfaas.core.transfer.tickets import TicketRefusal, TicketRefusedError
from prfaas.membership.agreements import Agreements
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.comparing import Compare
from prfaas.wire.messages.gateway import (
    LinkLease,
    Pinned,
    PinPrefix,
    Purge,
    Purged,
    PurgeEnd,
    PurgePrefix,
)
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
        """Check a ticket whose signature is valid.

        Raises:
            TicketRefusedError: It is for parts, tenants or blocks of another site.
        """
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
            case Purge() | PurgeEnd() | PurgePrefix():
                tag = message.tenant
                # A source is a pool node, which other sites use as well.
                source = "" if isinstance(message, PurgePrefix) else message.source
                if tag is not None and not source and self._agreements.claim(tag, site):
                    return True
                if isinstance(message, Purge | PurgePrefix):
                    answer(_not_purged(message))
                return False
            case PinPrefix():
                answer(Pinned(job=message.job, num_blocks=0, num_bytes=0, problem=NO_PINS))
        return not isinstance(message, PinPrefix | Compare | LinkLease)


def _not_purged(message: Purge | PurgePrefix) -> Purged:
    return Purged(
        job=message.job,
        num_blocks=0,
        host_bytes=0,
        disk_bytes=0,
        num_transfers=0,
        problem=NOT_YOURS,
    )
