"""Actions: what the driver of a machine has to do for its transfers, in order.

Of a peer without a connection, what is to be sent is left out: `LinkCame` makes up for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.kv.shipping import NamedBlocks
from prfaas.core.transfer.events import BlockReady, kinds_of
from prfaas.core.transfer.link_scheduler import TenantShare
from prfaas.core.transfer.tickets import Ticket, TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from prfaas.records import Record


class TransferAction(Record, frozen=True):
    """Base of all actions: those of both ends, and of one."""


class ReceiverAction(TransferAction, frozen=True):
    """Base of actions of the receiving end."""


class SenderAction(TransferAction, frozen=True):
    """Base of actions of the sending end."""


class CheckTicket(ReceiverAction, frozen=True):
    """Check the ticket of a request for a transfer with `peer`; report `Granted`, `NotGranted`.

    `asker` is that of a pull.
    """

    peer: str
    transfer_id: bytes
    request: Any
    asker: Any = None


class RecordRefusal(TransferAction, frozen=True):
    """Count and record that a ticket does not allow something."""

    transfer_id: bytes
    error: TicketRefusedError


class PeerNews(StrEnum):
    """Kinds of messages to a peer about a transfer."""

    ACCEPTED = "accepted"
    """Its blocks are taken."""
    REFUSED = "refused"
    """Its blocks are dropped."""
    COMPUTED = "computed"
    """The engine that computes the blocks of a pull has answered."""
    COMMITTED = "committed"
    """All its blocks are here."""
    ABORTED = "aborted"
    """It is over without a commit."""


class Tell(TransferAction, frozen=True):
    """Report something about a transfer to the peer.

    `reason` is that of a refusal or an abort, and `kind` that of an abort.
    """

    peer: str
    transfer_id: bytes
    news: PeerNews
    reason: str = ""
    kind: TransferEnd = TransferEnd.ABORTED


class Acknowledge(ReceiverAction, frozen=True):
    """Report to the peer that blocks of a transfer are here: one at least, of its layout."""

    peer: str
    transfer_id: bytes
    names: tuple[BlockName, ...]


class AskSource(ReceiverAction, frozen=True):
    """Request blocks of a pull from their source; without a connection report `GivenUp`."""

    request: Any
    lacking: tuple[BlockKey, ...]


class Answer(ReceiverAction, frozen=True):
    """Tell who asked for a pull what its source does not have, or with a reason that it is not
    served."""

    transfer_id: bytes
    asker: Any
    missing: tuple[BlockKey, ...] = ()
    refusal: str = ""


class Keep(ReceiverAction, frozen=True):
    """Put a block into the store, unless it is barred; report `BlockKept`."""

    peer: str
    """Its origin."""
    payload: Any
    """That of `BlockCame`."""
    ticket: Ticket
    lease_until_ns: int | None
    """It is not evicted until then; None if no request waits for it."""
    is_pulled: bool
    """It was fetched from here."""


class Redeliver(ReceiverAction, frozen=True):
    """Report `BlockCame` again for blocks that came before their offer, then let go of them."""

    blocks: list[Any]


class LetGo(ReceiverAction, frozen=True):
    """Let go of blocks that came before their offer: nobody wants them."""

    payloads: list[Any]


class EndLeases(ReceiverAction, frozen=True):
    """No request waits for these blocks: they may be evicted."""

    names: Iterable[BlockName]


class CountDropped(ReceiverAction, frozen=True):
    """Count a block that was dropped; `reason` is one of a bounded set."""

    reason: str


class MakeRoom(ReceiverAction, frozen=True):
    """Evict what may be: a block found no memory."""


class Ended(TransferAction, frozen=True):
    """A transfer is over: drop its unfinished blocks, and report it. Once for each."""

    transfer: Transfer


# --- the sending end ---


class SendOffer(SenderAction, frozen=True):
    """Announce a transfer to the peer, with its ticket and the list of its blocks."""

    transfer_id: bytes
    sealed: bytes
    named: NamedBlocks


class SendCommit(SenderAction, frozen=True):
    """Tell the peer how many blocks there are, and which of a pull are not here."""

    transfer_id: bytes
    num_blocks: int
    missing: tuple[BlockKey, ...]


class SendBlock(SenderAction, frozen=True):
    """Pin a block and queue it."""

    block: BlockReady
    tenant: TenantShare
    quality: Quality


class CloseQueue(SenderAction, frozen=True):
    """Close the queue of a transfer."""

    transfer_id: bytes


class Landed(SenderAction, frozen=True):
    """Let go of blocks: the peer has them."""

    transfer_id: bytes
    blocks: list[BlockReady]


class Withdraw(SenderAction, frozen=True):
    """Take what is queued of a transfer back, and let go of its blocks."""

    transfer_id: bytes
    blocks: list[BlockReady]


class Distrust(SenderAction, frozen=True):
    """The peer broke the protocol: end its connection."""

    why: str


RECEIVED = kinds_of(TransferAction, ReceiverAction)
"""Those of the receiving end."""
SENT = kinds_of(TransferAction, SenderAction)
"""Those of the sending end."""
