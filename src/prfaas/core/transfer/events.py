"""Events of transfers: what happens to them, as the driver of a machine reports it.

`payload`, `request` and `asker` are the driver's own, and come back in actions; no machine looks
into them.
"""

from __future__ import annotations

from typing import Any

from prfaas.core.codec.codecs import SegmentMode
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.kv.shipping import NamedBlocks
from prfaas.core.transfer.tickets import Ticket, TicketRefusal
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.records import Record


class TransferInput(Record, frozen=True):
    """Base of all events. One that its transfer has no use for is late, and ends nothing.

    Attributes:
        peer: Pool at the other end; "" if the event is not of one.
        transfer_id: The transfer; empty if the event is of several.
    """

    peer: str = ""
    transfer_id: bytes = b""


# --- the receiving end ---


class Offered(TransferInput, frozen=True):
    """A peer announced a transfer. Announcing it twice is harmless."""

    request: Any = None


class PullAsked(TransferInput, frozen=True):
    """Blocks are to be fetched from `peer` for `asker`.

    `is_computed`: only that the engine that computes them has answered.
    """

    request: Any = None
    asker: Any = None
    is_computed: bool = False


class Granted(TransferInput, frozen=True, kw_only=True):
    """The ticket allows the transfer: at the receiving end, that which `CheckTicket` named.

    Attributes:
        named: Blocks that it allows.
        lifetime_ns: Time limit of the transfer from now on.
        lacking: Blocks of a pull that are not here; None for an offer.
        request: That of `CheckTicket`, for a pull; at the sending end, the ticket as it came.
        asker: That of `PullAsked`.
    """

    ticket: Ticket
    named: NamedBlocks
    lifetime_ns: int
    lacking: tuple[BlockKey, ...] | None = None
    request: Any = None
    asker: Any = None


class NotGranted(TransferInput, frozen=True, kw_only=True):
    """It does not; `asker` is that of a pull."""

    reason: TicketRefusal
    asker: Any = None


class BlockCame(TransferInput, frozen=True, kw_only=True):
    """A block is complete and intact. Without an action it is held until `Redeliver` or `LetGo`."""

    name: BlockName
    num_bytes: int
    payload: Any = None
    modes: frozenset[SegmentMode] = frozenset()


class BlockKept(TransferInput, frozen=True, kw_only=True):
    """A block of `Keep` is in the store, or is not for the reason `failure`."""

    name: BlockName
    num_bytes: int
    failure: TransferEnd | None = None


class Unwanted(TransferInput, frozen=True):
    """Fragments came of a transfer that takes none."""


class NoRoom(TransferInput, frozen=True):
    """Fragments came for which there is no memory."""


class CommitCame(TransferInput, frozen=True, kw_only=True):
    """The peer said how many blocks there are, and which of a pull it does not have."""

    num_blocks: int
    missing: tuple[BlockKey, ...] = ()


class AbortCame(TransferInput, frozen=True, kw_only=True):
    """The peer gave a transfer up."""

    kind: TransferEnd
    reason: str = ""


class RefusedCame(TransferInput, frozen=True, kw_only=True):
    """The peer does not take, or serve, a transfer."""

    reason: str


class GivenUp(TransferInput, frozen=True):
    """A transfer is given up here: a gateway, or something that failed, ends it."""

    kind: TransferEnd = TransferEnd.ABORTED
    reason: str = ""


class Released(TransferInput, frozen=True):
    """No request waits for the blocks any more. An open transfer continues."""


class LinkCame(TransferInput, frozen=True):
    """A peer is connected anew.

    Attributes:
        resumes: Transfers that a sender continues; its others are over.
        epoch: Of the state of a receiver; another one has lost all transfers.
    """

    resumes: tuple[bytes, ...] = ()
    epoch: str = ""


class DataDropped(TransferInput, frozen=True):
    """The data connections of a peer, or all if it is "", are over."""

    is_final: bool = False


class LinkBroke(TransferInput, frozen=True):
    """The link of a peer broke: its transfers wait for the grace time."""


class PeerLost(TransferInput, frozen=True):
    """A peer does not come back, or is not trusted."""


class Purged(TransferInput, frozen=True):
    """Blocks of a pool are dropped from now on."""


class Ticked(TransferInput, frozen=True):
    """Time has passed."""


# --- the sending end ---


class BlockReady(TransferInput, frozen=True, kw_only=True):
    """A block of a transfer can be sent."""

    name: BlockName
    num_bytes: int
    payload: Any = None


class ListClosed(TransferInput, frozen=True, kw_only=True):
    """No more blocks come; `missing` were requested, and are not here."""

    missing: tuple[BlockKey, ...] = ()


class AcceptedCame(TransferInput, frozen=True):
    """The peer takes the blocks."""


class ArrivedCame(TransferInput, frozen=True, kw_only=True):
    """The peer has blocks."""

    names: tuple[BlockName, ...]


class CommittedCame(TransferInput, frozen=True):
    """The peer has all blocks."""


class LinkUp(TransferInput, frozen=True):
    """Blocks can be sent to the peer."""


EVENTS: tuple[type[TransferInput], ...] = tuple(TransferInput.__subclasses__())
"""All kinds of events; those behind `Ticked` are of the sending end alone."""
RECEIVED = EVENTS[: EVENTS.index(Ticked) + 1]
"""Those of the receiving end."""
_OF_BOTH = (Granted, AbortCame, RefusedCame, GivenUp, LinkCame, LinkBroke, PeerLost, Ticked)
SENT: tuple[type[TransferInput], ...] = (*_OF_BOTH, *EVENTS[len(RECEIVED) :])
"""Those of the sending end."""
