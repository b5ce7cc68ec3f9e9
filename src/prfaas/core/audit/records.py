"""Records of an audit log: kinds and outcomes, and the fields of each kind.

Records have names, ids, counts and fixed words; never prompts, salts, keys or free text of a peer.
"""

from __future__ import annotations

from enum import StrEnum

from prfaas.core.audit.chain import FORMAT, Fields
from prfaas.core.transfer.tickets import Ticket


class RecordKind(StrEnum):
    """Kind of a record."""

    FILE = "file"
    """First line of a file."""
    START = "start"
    """A process began to write."""
    CHECKPOINT = "checkpoint"
    GAP = "gap"
    """Records that could not be written."""
    REMOVED = "removed"
    """A file that was deleted, as `keep` demands."""
    TICKET = "ticket"
    """A gateway signed a ticket."""
    GRANTED = "granted"
    """A pool node accepted a ticket."""
    MOVEMENT = "movement"
    """Blocks moved between two pool nodes."""
    REFUSAL = "refusal"
    OPERATOR = "operator"
    """An operator changed something, or tried to."""
    PURGE = "purge"
    ALARM = "alarm"
    """A source was barred, since its blocks were altered."""
    USAGE = "usage"
    """Usage of engines or of storage since the last record of it."""
    TERMS = "terms"
    """Prices and sizes of a cluster from now on."""


class CheckpointCause(StrEnum):
    """Cause of a checkpoint."""

    START = "start"
    LINES = "lines"
    TIME = "time"
    ROTATION = "rotation"
    END = "end"


LATE, STOPPED = "late", "stopped"
"""Outcomes of movements in addition to the ends of transfers: bytes that were counted after the end
of their transfer, and transfers that were open when the process stopped."""
TORN = "torn line after restart"
"""Note in the `start` record after a line that was not written whole."""


def file_header(log: str, number: int, previous: bytes) -> Fields:
    """Fields of the first line of a file.

    Args:
        log: Name of the process.
        number: Number of the file, from 1.
        previous: Digest of the last line of the file before.
    """
    return {
        "kind": RecordKind.FILE,
        "format": FORMAT,
        "log": log,
        "file": number,
        "previous": previous.hex(),
    }


def permission(kind: RecordKind, ticket: Ticket, **fields: object) -> Fields:
    """Fields of a ticket that was signed or accepted."""
    return {
        "kind": kind,
        "transfer": ticket.transfer_id.hex(),
        "tenant": ticket.tenant,
        "from": ticket.source,
        "to": ticket.destination,
        "bytes_max": ticket.bytes_max,
        "class": "",
        "region": ",".join(sorted(ticket.regions)),
        **fields,
    }
