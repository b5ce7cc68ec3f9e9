"""Records of a pool node: tickets that it accepts or refuses, movements, purges, bytes on links.

Fragments are counted on the thread that sends and receives them, also of transfers that are over:
a fragment that was on its way when its transfer ended has crossed the link. So every byte that a
counter counts belongs to one entry here, and is taken out of it once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.settings import AuditSettings
from prfaas.audit.writer import AuditLog
from prfaas.core.audit.records import LATE, STOPPED, RecordKind, permission
from prfaas.core.audit.refusals import RefusalCounts
from prfaas.core.facts import FactStream
from prfaas.core.transfer.facts import (
    RECEIVED,
    SENT,
    PurgeDone,
    TicketGranted,
    TicketRefused,
    TicketUse,
    TransferDone,
)
from prfaas.core.transfer.tickets import Ticket, TicketRefusal, TicketRefusedError
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.units import NS_PER_S

ENTRIES_MAX = 50_000
"""More transfers are counted together: a peer chooses the ids of fragments that nobody wants."""
REST_MAX = 100
"""Late entries of one sweep that are reported each; others are reported together."""


@dataclass(frozen=True, slots=True)
class TransferBytes:
    """Bytes of one transfer."""

    direction: str
    peer: str
    """Pool at the other end."""
    transfer_id: bytes
    """Empty for several together."""
    link_bytes: int = 0
    """As `prfaas_link_bytes` counts."""
    wire_bytes: int = 0
    """As `prfaas_link_wire_bytes` counts."""


_Key = tuple[str, str, bytes]


class MovedBytes:
    """Counts of bytes that no record has yet. Any thread may call it.

    Args:
        entries_max: Transfers that are counted each; further ones are counted together.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._lock = threading.Lock()
        self._counts: dict[_Key, list[int]] = {}
        self._late: set[_Key] = set()
        """Entries without an open transfer at the last sweep."""

    def add(
        self,
        direction: str,
        peer: str,
        transfer_id: bytes,
        *,
        link_bytes: int = 0,
        wire_bytes: int = 0,
    ) -> None:
        """Count bytes of a transfer."""
        key = direction, peer, transfer_id
        with self._lock:
            if key not in self._counts and len(self._counts) >= self._entries_max:
                key = direction, peer, b""
            counts = self._counts.setdefault(key, [0, 0])
            counts[0] += link_bytes
            counts[1] += wire_bytes

    def take(self, direction: str, peer: str, transfer_id: bytes) -> TransferBytes:
        """Take the bytes of a transfer that has ended."""
        key = direction, peer, transfer_id
        with self._lock:
            return TransferBytes(*key, *self._counts.pop(key, (0, 0)))

    def sweep(self, is_open: Callable[[str, bytes], bool]) -> list[TransferBytes]:
        """Take bytes of transfers that were not open at two sweeps in a row.

        Args:
            is_open: Returns True for a direction and the id of an open transfer.
        """
        with self._lock:
            over = {key for key in self._counts if not is_open(key[0], key[2])}
            found = [TransferBytes(*key, *self._counts.pop(key)) for key in over & self._late]
            self._late = over - {(each.direction, each.peer, each.transfer_id) for each in found}
        return [*found[:REST_MAX], *_together(found[REST_MAX:])]

    def take_all(self) -> list[TransferBytes]:
        """Take what is left, at the end of the process."""
        with self._lock:
            found = [TransferBytes(*key, *counts) for key, counts in self._counts.items()]
            self._counts.clear()
        return found


def _together(found: list[TransferBytes]) -> list[TransferBytes]:
    sums: dict[tuple[str, str], list[int]] = {}
    for each in found:
        row = sums.setdefault((each.direction, each.peer), [0, 0])
        row[0] += each.link_bytes
        row[1] += each.wire_bytes
    return [TransferBytes(*key, b"", *row) for key, row in sums.items()]


SWEEP_NS = 5 * NS_PER_S
TICKETS_MAX = 50_000
"""Tickets of open transfers; a movement of one that is forgotten has no tenant."""


class PoolAudit:
    """Writes the records of one pool node; ConfigError if the log cannot be written.

    Args:
        metrics: Show the state of the log.
        moved: Bytes on links.
        site_of: Site of a gateway, where several sites share the pool node: the bill is by site.
    """

    def __init__(
        self,
        settings: AuditSettings,
        pool: str,
        metrics: AuditMetrics,
        moved: MovedBytes,
        site_of: Callable[[str], str | None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.log = AuditLog(settings, pool, metrics)
        self._pool, self._moved, self._clock_ns = pool, moved, clock_ns
        self._site_of = site_of
        self._tickets: OrderedDict[tuple[str, bytes], Ticket] = OrderedDict()
        self._refusals = RefusalCounts()
        self._swept_at_ns = clock_ns()

    def follow(self, facts: FactStream) -> None:
        """Record the facts of the pool node from now on, and refuse what cannot be recorded."""
        facts.guard(TicketUse, self._may_use)
        facts.subscribe(TicketGranted, self._granted)
        facts.subscribe(TicketRefused, self._refused)
        facts.subscribe(TransferDone, self._ended)
        facts.subscribe(PurgeDone, self._purged)
        facts.keep(self.log.written)

    def _may_use(self, _: TicketUse) -> None:
        if not self.log.accepts:
            raise TicketRefusedError(
                TicketRefusal.NOT_AUDITED,
                'the audit log cannot be written, and audit.on_full is "closed"',
            )

    def _granted(self, fact: TicketGranted) -> None:
        ticket = fact.ticket
        direction = SENT if ticket.source == self._pool else RECEIVED
        self._tickets[direction, ticket.transfer_id] = ticket
        if len(self._tickets) > TICKETS_MAX:
            self._tickets.popitem(last=False)
        fields = permission(RecordKind.GRANTED, ticket, gateway=ticket.signer, direction=direction)
        site = self._site_of(ticket.signer)
        self.log.write({**fields, "tenant_name": site} if site else fields)

    def _refused(self, fact: TicketRefused) -> None:
        reason = fact.error.reason.value
        if self._refusals.take((fact.end, reason), self._clock_ns()):
            self.log.write(_refusal(fact.end, reason, transfer=fact.transfer_id.hex()))

    def _ended(self, fact: TransferDone) -> None:
        direction, transfer = fact.direction, fact.transfer
        transfer_id = transfer.transfer_id
        moved = self._moved.take(direction, transfer.peer, transfer_id)
        outcome = transfer.end or TransferEnd.ABORTED
        self._move(moved, outcome, blocks=transfer.num_blocks, num_bytes=transfer.num_bytes)
        self._tickets.pop((direction, transfer_id), None)

    def _purged(self, fact: PurgeDone) -> None:
        record: dict[str, object] = {
            "kind": RecordKind.PURGE,
            "gateway": fact.gateway,
            "from": fact.source,
            "outcome": "complete" if fact.is_complete else "incomplete",
        }
        if fact.tenant is not None:
            record["tenant"] = fact.tenant
        if fact.prefix:
            record["prefix"] = fact.prefix
        record |= {"blocks": fact.num_blocks, "bytes": fact.num_bytes}
        if fact.num_transfers is not None:
            record["transfers"] = fact.num_transfers
        self.log.write(record)

    def sweep(self, is_open: Callable[[str, bytes], bool]) -> None:
        """Record bytes that came after the end of their transfer, now and then.

        Args:
            is_open: Returns True for a direction and the id of an open transfer.
        """
        now_ns = self._clock_ns()
        if now_ns - self._swept_at_ns < SWEEP_NS:
            return
        self._swept_at_ns = now_ns
        for moved in self._moved.sweep(is_open):
            self._move(moved, LATE)
        self._count_refusals(now_ns)

    def close(self) -> None:
        """Record what is left, and end the log. Blocks for as long as the disk takes."""
        for moved in self._moved.take_all():
            self._move(moved, STOPPED)
        self._count_refusals(self._clock_ns(), is_end=True)
        self.log.close()

    def _count_refusals(self, now_ns: int, *, is_end: bool = False) -> None:
        for key, count in self._refusals.counted(now_ns, is_end=is_end):
            end, reason = key or ("", "")
            self.log.write(_refusal(end, reason, count=count))

    def _move(
        self, moved: TransferBytes, outcome: str, *, blocks: int = 0, num_bytes: int = 0
    ) -> None:
        direction, peer = moved.direction, moved.peer
        ticket = self._tickets.get((direction, moved.transfer_id))
        ends = (self._pool, peer) if direction == SENT else (peer, self._pool)
        record = {
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
        self.log.write(record)


def _refusal(end: str, reason: str, **fields: object) -> dict[str, object]:
    return {"kind": RecordKind.REFUSAL, "end": end, "reason": reason, **fields}
