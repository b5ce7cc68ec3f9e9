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
    """Base of all events. One that its transfer has no use for is late, and ends nothing."""

    peer: str = ""
    """Pool at the other end; "" if the event is not of one."""
    transfer_id: bytes = b""
    """The transfer; empty if the event is of several."""


class ReceiverInput(TransferInput, frozen=True):
    """Base of events of the receiving end."""


class SenderInput(TransferInput, frozen=True):
    """Base of events of the sending end."""


# --- the receiving end ---


class Offered(ReceiverInput, frozen=True):
    """A peer announced a transfer. Announcing it twice is harmless."""

    request: Any = None


class PullAsked(ReceiverInput, frozen=True):
    """Blocks are to be fetched from `peer` for `asker`.

    `is_computed`: only that the engine that computes them has answered.
    """

    request: Any = None
    asker: Any = None
    is_computed: bool = False


class Granted(TransferInput, frozen=True, kw_only=True):
    """The ticket allows the transfer: at the receiving end, that which `CheckTicket` named."""

    ticket: Ticket
    named: NamedBlocks
    """Blocks that it allows."""
    lifetime_ns: int
    """Time limit of the transfer from now on."""
    lacking: tuple[BlockKey, ...] | None = None
    """Blocks of a pull that are not here; None for an offer."""
    request: Any = None
    """That of `CheckTicket`, for a pull; at the sending end, the ticket as it came."""
    asker: Any = None
    """That of `PullAsked`."""


class NotGranted(ReceiverInput, frozen=True, kw_only=True):
    """It does not; `asker` is that of a pull."""

    reason: TicketRefusal
    asker: Any = None


class BlockCame(ReceiverInput, frozen=True, kw_only=True):
    """A block is complete and intact. Without an action it is held until `Redeliver` or `LetGo`."""

    name: BlockName
    num_bytes: int
    payload: Any = None
    modes: frozenset[SegmentMode] = frozenset()


class BlockKept(ReceiverInput, frozen=True, kw_only=True):
    """A block of `Keep` is in the store, or is not for the reason `failure`."""

    name: BlockName
    num_bytes: int
    failure: TransferEnd | None = None


class Unwanted(ReceiverInput, frozen=True):
    """Fragments came of a transfer that takes none."""


class NoRoom(ReceiverInput, frozen=True):
    """Fragments came for which there is no memory."""


class CommitCame(ReceiverInput, frozen=True, kw_only=True):
    """The peer said how many blocks there are, and which of a pull it does not have."""

    num_blocks: int
    missing: tuple[BlockKey, ...] = ()


class AbortCame(TransferInput, frozen=True, kw_only=True):
    """The peer gave a transfer up, or does not take or serve it: then `kind` is REFUSED."""

    kind: TransferEnd
    reason: str = ""


class GivenUp(TransferInput, frozen=True):
    """A transfer is given up here: a gateway, or something that failed, ends it."""

    kind: TransferEnd = TransferEnd.ABORTED
    reason: str = ""


class Released(ReceiverInput, frozen=True):
    """No request waits for the blocks any more. An open transfer continues."""


class LinkCame(TransferInput, frozen=True):
    """A peer is connected anew."""

    resumes: tuple[bytes, ...] = ()
    """Transfers that a sender continues; its others are over."""
    epoch: str = ""
    """Of the state of a receiver; another one has lost all transfers."""


class DataDropped(ReceiverInput, frozen=True):
    """The data connections of a peer, or all if it is "", are over."""

    is_final: bool = False


class LinkBroke(TransferInput, frozen=True):
    """The link of a peer broke: its transfers wait for the grace time."""


class PeerLost(TransferInput, frozen=True):
    """A peer does not come back, is not trusted, or its blocks are dropped: all transfers end."""

    kind: TransferEnd = TransferEnd.LINK_LOST


class Ticked(TransferInput, frozen=True):
    """Time has passed."""


# --- the sending end ---


class BlockReady(SenderInput, frozen=True, kw_only=True):
    """A block of a transfer can be sent."""

    name: BlockName
    num_bytes: int
    payload: Any = None


class ListClosed(SenderInput, frozen=True, kw_only=True):
    """No more blocks come; `missing` were requested, and are not here."""

    missing: tuple[BlockKey, ...] = ()


class AcceptedCame(SenderInput, frozen=True):
    """The peer takes the blocks."""


class ArrivedCame(SenderInput, frozen=True, kw_only=True):
    """The peer has blocks."""

    names: tuple[BlockName, ...]


class CommittedCame(SenderInput, frozen=True):
    """The peer has all blocks."""


class LinkUp(SenderInput, frozen=True):
    """Blocks can be sent to the peer."""


def kinds_of(*bases: type) -> tuple[type[Any], ...]:
    """Return the kinds that have one of these as their base, the further bases left out."""
    found: list[type[Any]] = []
    for base in bases:
        found += base.__subclasses__()
    return tuple(kind for kind in found if not kind.__subclasses__())


RECEIVED = kinds_of(TransferInput, ReceiverInput)
"""Those of the receiving end."""
SENT = kinds_of(TransferInput, SenderInput)
"""Those of the sending end."""
