"""Facts of a gateway: what has happened to requests, tickets, blocks and settings.

The gateway reports each once (`core/facts.py`); the audit log, the bill, metrics and verification
subscribe where the process is put together (`cli/parts/gateway_annexes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.core.control.changes import ChangeEntry
from prfaas.core.dispatch.types import Arrival, Routed
from prfaas.core.transfer.tickets import Ticket


@dataclass(frozen=True, slots=True)
class ChangeAsked:
    """A change to ask for: an operator's request changes something. Guards raise `RequestError`."""

    operator: str


@dataclass(frozen=True, slots=True)
class SettingChanged:
    """A loop or an operator has changed something."""

    change: ChangeEntry

    @property
    def operator(self) -> str:
        """Name of the operator's key; empty for a loop."""
        return self.change.operator


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request had no right, or an operator's change was refused."""

    method: str
    route: str
    """Pattern of its path; empty if there is no such route."""
    status: int
    address: str
    """Of the client."""
    operator: str
    """Name of the operator's key; empty without a right."""


@dataclass(frozen=True, slots=True)
class TicketSigned:
    """A ticket was signed for a tenant and a class of service, empty for none."""

    ticket: Ticket
    tenant: str
    service: str


@dataclass(frozen=True, slots=True)
class PrefillBooked:
    """A prefill was booked at an instance."""

    arrival: Arrival
    routed: Routed
    work_ns: int
    """Work of the instance; 0 without a profile."""
    saved_ns: int
    """Work that the cached prefix saves it; 0 without a profile."""


@dataclass(frozen=True, slots=True)
class PrefixCopied:
    """A pool was asked to fetch a prefix that no request waits for."""

    source: str
    pool: str
    hashes: Sequence[bytes]
    """Hash chain of the prefix."""


@dataclass(frozen=True, slots=True)
class PartSeen:
    """An engine became ready or failed a look, or a pool node reported or was lost."""

    name: str


@dataclass(frozen=True, slots=True)
class RequestTroubled:
    """A request has left its route, was refused, or failed."""

    request_id: str
    tenant: str
    started_unix_s: float
    what: str
    """Stage of a fallback, "prefill", "transfer", "decode" or "pull"; "refused" or "failed"."""
    reason: str
    """One of a bounded set."""
    engine: str
    """The engine that it had there; empty without one."""
    pools: tuple[str, str] = ("", "")
    """Source and destination of its blocks; empty names without."""


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request has ended, whichever way."""

    tenant: str
    service: str
    """Its class of service; empty without."""
    is_finished: bool
    """True if it was answered in full."""
    at_ns: int
    """Instant of its end."""
    decode_at_ns: int | None
    """Instant at which an engine was asked to decode; None if none was."""
    decode_ns: int | None
    """From its first token to its end; None if it was no stream."""
    num_output_tokens: int
    slot_ns: int
    """Time of its sequences in engines that decode."""
