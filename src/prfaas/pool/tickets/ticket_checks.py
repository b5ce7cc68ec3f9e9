"""A pool node's side of tickets: nothing is sent or taken in without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from dataclasses import dataclass

from prfaas.core.facts import FactStream
from prfaas.core.kv.shipping import Manifest, NamedBlocks, manifest_digest
from prfaas.core.transfer.facts import TicketGranted, TicketRefused, TicketUse
from prfaas.core.transfer.residency import Regions, check_ticket_regions
from prfaas.core.transfer.tickets import (
    CLOCK_SKEW_NS,
    Ticket,
    TicketRefusal,
    TicketRefusedError,
    UsedTickets,
    check_ticket,
)
from prfaas.logs import log_event
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.wire.tickets import TicketOpener

log = logging.getLogger(__name__)

SOURCE, DESTINATION = "source", "destination"
"""The two ends of a transfer; label a metric."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A ticket that was checked and is used up."""

    ticket: Ticket
    sealed: bytes
    """The same as it came, for the other end."""
    named: NamedBlocks
    """The blocks that may move."""
    lifetime_ns: int
    """Time that the transfer may stay open from the check on."""


class TicketChecks:
    """Checks tickets, and counts those it refuses.

    Args:
        facts: Asked with `TicketUse`; gets `TicketGranted` and `TicketRefused`.
        regions: Our footprint; without any, tickets need no region.
    """

    def __init__(
        self,
        pool: str,
        opener: TicketOpener,
        metrics: PoolMetrics,
        facts: FactStream,
        regions: Regions = frozenset(),
    ) -> None:
        self._facts, self.regions = facts, regions
        self._peers: dict[str, Regions] = {}
        """Regions in the certificate of each pool, as of its last connection."""
        self._pool = pool
        self._opener = opener
        self._metrics = metrics
        self._unix_ns = time.time_ns
        self._used = UsedTickets()
        self.is_draining = False
        """Refuse all tickets: the pool is about to stop."""

    def met(self, peer: str, regions: Regions) -> bool:
        """A pool has connected with a certificate that names these regions.

        Returns:
            True if its certificate named others before: what is open with it has to end.
        """
        before = self._peers.get(peer, regions)
        self._peers[peer] = regions
        return bool(self.regions) and before != regions

    def to_send(
        self,
        sealed: bytes,
        blocks: Manifest,
        *,
        transfer_id: bytes,
        destination: str,
        layout_id: bytes | None,
    ) -> Grant:
        """Use a ticket to send blocks of one layout to another pool; TicketRefusedError if it does
        not allow that.

        Args:
            sealed: The ticket as it came.
            blocks: The list that came with it.
            destination: Where the blocks would go.
            layout_id: The layout of the engine that asks; None takes the ticket's.
        """
        layouts = frozenset({layout_id} if layout_id is not None else ())
        return self._use(sealed, blocks, transfer_id, (self._pool, destination), layouts, None)

    def to_receive(
        self,
        sealed: bytes,
        blocks: Manifest,
        *,
        transfer_id: bytes,
        source: str,
        layouts: Set[bytes],
        free_bytes: int,
    ) -> Grant:
        """Use a ticket to take blocks in from another pool.

        Args:
            sealed: The ticket as it came.
            blocks: The list that came with it.
            source: The pool that offers it.
            layouts: Those of local engines; with none, any will do.
            free_bytes: Bytes that the store can still reserve.

        Raises:
            TicketRefusedError: It does not allow that, or there is no use or room for the blocks.
        """
        return self._use(sealed, blocks, transfer_id, (source, self._pool), layouts, free_bytes)

    def refused(self, end: str, transfer_id: bytes, error: TicketRefusedError) -> None:
        """Count and report a refusal, also one that came out while blocks were moving."""
        self._facts.report(TicketRefused(end, transfer_id, error))
        self._metrics.tickets_refused.labels(end=end, reason=error.reason.value).inc()
        fields = {"transfer": transfer_id.hex(), "reason": error.reason.value, "why": str(error)}
        log_event(log, logging.WARNING, "ticket_refused", end=end, **fields)

    def _use(
        self,
        sealed: bytes,
        blocks: Manifest,
        transfer_id: bytes,
        ends: tuple[str, str],
        layouts: Set[bytes],
        free_bytes: int | None,
    ) -> Grant:
        source, destination = ends
        now_ns = self._unix_ns()
        try:
            if self.is_draining:
                raise TicketRefusedError(
                    TicketRefusal.DRAINING, "this pool accepts no new transfers"
                )
            ticket = self._opener.open(sealed, now_ns)
            check_ticket(
                ticket,
                transfer_id=transfer_id,
                source=source,
                destination=destination,
                now_ns=now_ns,
            )
            peer = destination if source == self._pool else source
            peer_regions = self._peers.get(peer, frozenset())
            check_ticket_regions(ticket, self.regions, peer, peer_regions)
            if manifest_digest(blocks) != ticket.blocks:
                raise TicketRefusedError(
                    TicketRefusal.OTHER_BLOCKS,
                    "its list of blocks is not the one that was signed",
                )
            if layouts and ticket.layout_id not in layouts:
                raise TicketRefusedError(
                    TicketRefusal.LAYOUT, f"no engine here has layout {ticket.layout_id.hex()[:12]}"
                )
            if free_bytes is not None and ticket.bytes_max > free_bytes:
                raise TicketRefusedError(
                    TicketRefusal.NO_ROOM,
                    f"it allows {ticket.bytes_max} bytes, and {free_bytes} are free",
                )
            self._facts.may(TicketUse(ticket, peer, blocks))
            self._used.use(ticket, now_ns)
        except TicketRefusedError as error:
            self.refused(SOURCE if source == self._pool else DESTINATION, transfer_id, error)
            raise
        self._facts.report(TicketGranted(ticket))
        return Grant(
            ticket, sealed, NamedBlocks(blocks), ticket.expires_at_ns + CLOCK_SKEW_NS - now_ns
        )
