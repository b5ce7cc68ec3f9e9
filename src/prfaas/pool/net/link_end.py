"""This pool's end of all its links: its name, its threads, and the operator's choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.io_thread import IoThread
from prfaas.wire.allow_list import AllowList


@dataclass(frozen=True, slots=True)
class SendLimits:
    """Limits of the data connections of a link."""

    stuck_ns: int = 5 * 10**9
    """A connection without delivery for this time is closed."""
    redial_s: float = 0.5
    """Wait before a lost connection is dialled again, seconds. It doubles while connections end
    soon."""
    redial_max_s: float = 8.0
    """Longest such wait, seconds."""
    fragment_bytes_min: int = 32 << 10
    """Smallest fragment that the size of fragments adapts to, bytes."""


SEND_LIMITS = SendLimits()


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """This pool's end of its links, in both directions."""

    pool: str
    """Name of this pool."""
    epoch: str
    """Our event epoch: tells a peer that comes back whether we are still the same."""
    io: IoThread
    """Place where data connections live."""
    metrics: PoolMetrics
    encryption: LinkEncryption = LinkEncryption.SEALED
    """The operator's choice for data connections."""
    grace_ns: int = 0
    """Time that transfers wait for a link that broke."""
    send: SendLimits = SEND_LIMITS


@dataclass(frozen=True, slots=True)
class Destination:
    """A pool to dial."""

    peer: str
    """Its name; its certificate has to have this name."""
    address: tuple[str, int]
    """Its host and port."""
    budget_bits_per_s: int = 0
    """What all data connections together may send; 0 is no limit."""
    num_connections: int = 0
    """Data connections; 0 is as many as budget and round trip ask for."""
    expected: AllowList = field(default_factory=lambda: AllowList(()))
    """Admits the peer alone."""
