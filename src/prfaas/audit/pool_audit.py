"""Records of a pool node: tickets that it accepts or refuses, movements, purges."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.moved_bytes import MovedBytes, TransferBytes
from prfaas.audit.settings import AuditSettings
from prfaas.audit.writer import AuditLog
from prfaas.core.audit.chain import Fields
from prfaas.core.audit.records import LATE, STOPPED, RecordKind, permission
from prfaas.core.audit.refusals import RefusalCounts
from prfaas.core.transfer.tickets import Ticket, TicketRefusal, TicketRefusedError, TicketUse
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from prfaas.units import NS_PER_S

SENT, RECEIVED = "sent", "received"
SWEEP_NS = 5 * NS_PER_S
TICKETS_MAX = 50_000
"""Tickets of open transfers; a movement of one that is forgotten has no tenant."""


class PoolAudit:
    """Writes the records of one pool node.

    Args:
        settings: None without an audit log; then nothing is recorded.
        metrics: Show the state of the log.
        moved: Bytes on links.

    Raises:
        ConfigError: The log cannot be written.
    """

    def __init__(
        self,
        settings: AuditSettings | None,
        pool: str,
        metrics: AuditMetrics,
        moved: MovedBytes,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._log = AuditLog(settings, pool, metrics) if settings is not None else None
        self._pool, self._moved, self._clock_ns = pool, moved, clock_ns
        moved.is_on = settings is not None
        self.site_of: Callable[[str], str | None] = lambda _: None
        """Site of a gateway, where several sites share the pool node: the bill is by site."""
        self._tickets: OrderedDict[tuple[str, bytes], Ticket] = OrderedDict()
        self._refusals = RefusalCounts()
        self._swept_at_ns = clock_ns()

    def allow(self, _use: TicketUse) -> None:
        """See that a ticket may be accepted.

        Raises:
            TicketRefusedError: The log cannot be written.
        """
        if self._log is not None and not self._log.accepts:
            raise TicketRefusedError(
                TicketRefusal.NOT_AUDITED,
                'the audit log cannot be written, and audit.on_full is "closed"',
            )

    def record(self, fields: Fields) -> None:
        """Write a record."""
        if self._log is not None:
            self._log.write(fields)

    def granted(self, ticket: Ticket) -> None:
        """A ticket was accepted, and is used up."""
        if self._log is None:
            return
        direction = SENT if ticket.source == self._pool else RECEIVED
        self._tickets[direction, ticket.transfer_id] = ticket
        if len(self._tickets) > TICKETS_MAX:
            self._tickets.popitem(last=False)
        fields = permission(RecordKind.GRANTED, ticket, gateway=ticket.signer, direction=direction)
        site = self.site_of(ticket.signer)
        self._log.write({**fields, "tenant_name": site} if site else fields)

    def refused(self, end: str, transfer_id: bytes, error: TicketRefusedError) -> None:
        """A ticket does not allow what was asked."""
        if self._log is None:
            return
        reason = error.reason.value
        if self._refusals.take((end, reason), self._clock_ns()):
            self._log.write(_refusal(end, reason, transfer=transfer_id.hex()))

    def ended(self, direction: str, transfer: Transfer) -> None:
        """A transfer has ended."""
        if self._log is None:
            return
        transfer_id = transfer.transfer_id
        moved = self._moved.take(direction, transfer.peer, transfer_id)
        outcome = transfer.end or TransferEnd.ABORTED
        self._move(moved, outcome, blocks=transfer.num_blocks, num_bytes=transfer.num_bytes)
        self._tickets.pop((direction, transfer_id), None)

    def purged(
        self,
        gateway: str,
        source: str,
        *,
        tenant: str | None,
        outcome: str,
        prefix: str = "",
        **counts: int,
    ) -> None:
        """Blocks of a source, or of a tenant, were dropped, and the tenant's keys destroyed.

        With the last hash of a prompt as `prefix`, blocks of this prompt were, and no keys.
        """
        if self._log is not None:
            named = {
                "kind": RecordKind.PURGE,
                "gateway": gateway,
                "from": source,
                "outcome": outcome,
            }
            if tenant is not None:
                named |= {"tenant": tenant}
            if prefix:
                named |= {"prefix": prefix}
            self._log.write({**named, **counts})

    async def written(self) -> bool:
        """Wait until all records are in the file; False if they cannot be written now."""
        return self._log is None or await self._log.written()

    def sweep(self, is_open: Callable[[str, bytes], bool]) -> None:
        """Record bytes that came after the end of their transfer, now and then.

        Args:
            is_open: Returns True for a direction and the id of an open transfer.
        """
        now_ns = self._clock_ns()
        if self._log is None or now_ns - self._swept_at_ns < SWEEP_NS:
            return
        self._swept_at_ns = now_ns
        for moved in self._moved.sweep(is_open):
            self._move(moved, LATE)
        self._count_refusals(now_ns)

    def close(self) -> None:
        """Record what is left, and end the log. Blocks for as long as the disk takes."""
        if self._log is None:
            return
        for moved in self._moved.take_all():
            self._move(moved, STOPPED)
        self._count_refusals(self._clock_ns(), is_end=True)
        self._log.close()

    def _count_refusals(self, now_ns: int, *, is_end: bool = False) -> None:
        for key, count in self._refusals.counted(now_ns, is_end=is_end):
            end, reason = key or ("", "")
            if self._log is not None:
                self._log.write(_refusal(end, reason, count=count))

    def _move(
        self, moved: TransferBytes, outcome: str, *, blocks: int = 0, num_bytes: int = 0
    ) -> None:
        direction, peer = moved.direction, moved.peer
        ticket = self._tickets.get((direction, moved.transfer_id))
        ends = (self._pool, peer) if direction == SENT else (peer, self._pool)
        if self._log is not None:
            self._log.write(
                {
                    "kind": RecordKind.MOVEMENT,
                    "direction": direction,
                    "transfer": moved.transfer_id.hex(),
                    "gateway": ticket.signer if ticket else "",
                    "tenant": ticket.tenant if ticket else "",
                    "from": ends[0],
                    "to": ends[1],
                    "outcome": str(outcome),
                    "blocks": blocks,
                    "bytes": num_bytes,
                    "link_bytes": moved.link_bytes,
                    "wire_bytes": moved.wire_bytes,
                    "class": "",
                    "region": ",".join(sorted(ticket.regions)) if ticket else "",
                }
            )


def _refusal(end: str, reason: str, **fields: object) -> dict[str, object]:
    return {"kind": RecordKind.REFUSAL, "end": end, "reason": reason, **fields}
