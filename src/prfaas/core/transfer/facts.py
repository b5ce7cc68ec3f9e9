"""Facts of a pool node: what has happened to tickets, transfers and blocks.

The pool node reports each once (`core/facts.py`); the audit log, the bill, spans, metrics and rules
of sites subscribe where the process is put together (`pool/process/process.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.kv.shipping import Manifest
from prfaas.core.transfer.tickets import Ticket, TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer

SENT, RECEIVED = "sent", "received"
"""Directions of a transfer, of its bytes, and of a link."""


@dataclass(frozen=True, slots=True)
class TicketUse:
    """A change to ask for: a ticket that was checked is used. Guards raise `TicketRefusedError`."""

    ticket: Ticket
    peer: str
    """Pool at the other end."""
    blocks: Manifest
    """The list that came with the ticket."""


@dataclass(frozen=True, slots=True)
class TicketGranted:
    """A ticket was accepted, and is used up."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class TicketRefused:
    """A ticket does not allow what was asked, perhaps while blocks were moving."""

    end: str
    """"source" or "destination"."""
    transfer_id: bytes
    error: TicketRefusedError


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A transfer has ended at this pool."""

    direction: str
    transfer: Transfer
    now_ns: int


@dataclass(frozen=True, slots=True)
class PurgeDone:
    """Blocks of a source, of a tenant or of a prompt were dropped."""

    gateway: str
    source: str
    """Empty for all of a tenant, or a prompt."""
    tenant: str | None
    """Tag; None for all of a source. Its keys were destroyed, unless there is a prefix."""
    is_complete: bool
    num_blocks: int
    num_bytes: int
    prefix: str = ""
    """Last hash of a prompt, hexadecimal; empty if all of a source or tenant were dropped."""
    num_transfers: int | None = None
    """Transfers that were ended; None for a prompt."""


@dataclass(frozen=True, slots=True)
class HousekeepingDone:
    """A round of housekeeping is over: about twice a second."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class LinksChanged:
    """A link has come up or gone down, was added or removed, or is busy and was measured."""


@dataclass(frozen=True, slots=True)
class EnginesChanged:
    """An engine has connected or left."""
