"""Actions: what the driver of a machine has to do for its transfers, in order.

Of a peer without a connection, what is to be sent is left out: `LinkCame` makes up for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.kv.shipping import NamedBlocks
from prfaas.core.transfer.events import BlockReady
from prfaas.core.transfer.link_scheduler import TenantShare
from prfaas.core.transfer.tickets import Ticket, TicketRefusedError
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from prfaas.records import Record


class TransferAction(Record, frozen=True):
    """Base of all actions."""


class CheckTicket(TransferAction, frozen=True):
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


class Accept(TransferAction, frozen=True):
    """Answer an offer: blocks are taken."""

    peer: str
    transfer_id: bytes


class Refuse(TransferAction, frozen=True):
    """Answer an offer: blocks are dropped."""

    peer: str
    transfer_id: bytes
    reason: str


class TellAbort(TransferAction, frozen=True):
    """Report to the peer that a transfer is over without a commit."""

    peer: str
    transfer_id: bytes
    kind: TransferEnd
    reason: str = ""


class Acknowledge(TransferAction, frozen=True):
    """Report to the peer that blocks of a transfer are here."""

    peer: str
    transfer_id: bytes
    names: Iterable[BlockName]


class TellCommitted(TransferAction, frozen=True):
    """Report to the peer that all blocks are here."""

    peer: str
    transfer_id: bytes


class AskSource(TransferAction, frozen=True):
    """Request blocks of a pull from their source; without a connection report `GivenUp`."""

    request: Any
    lacking: tuple[BlockKey, ...]


class TellComputed(TransferAction, frozen=True):
    """Tell the source of a pull that the engine that computes its blocks has answered."""

    peer: str
    transfer_id: bytes


class AnswerMissing(TransferAction, frozen=True):
    """Tell who asked for a pull what its source does not have."""

    transfer_id: bytes
    asker: Any
    keys: tuple[BlockKey, ...]


class AnswerRefused(TransferAction, frozen=True):
    """Tell who asked for a pull that it is not served."""

    transfer_id: bytes
    asker: Any
    reason: str


class Keep(TransferAction, frozen=True):
    """Put a block into the store, unless it is barred; report `BlockKept`.

    Attributes:
        peer: Where it came from.
        payload: That of `BlockCame`.
        lease_until_ns: It is not evicted until then; None if no request waits for it.
        is_pulled: It was fetched from here.
    """

    peer: str
    payload: Any
    ticket: Ticket
    lease_until_ns: int | None
    is_pulled: bool


class Redeliver(TransferAction, frozen=True):
    """Report `BlockCame` again for blocks that came before their offer, then let go of them."""

    blocks: list[Any]


class LetGo(TransferAction, frozen=True):
    """Let go of blocks that came before their offer: nobody wants them."""

    payloads: list[Any]


class EndLeases(TransferAction, frozen=True):
    """No request waits for these blocks: they may be evicted."""

    names: Iterable[BlockName]


class CountDropped(TransferAction, frozen=True):
    """Count a block that was dropped; `reason` is one of a bounded set."""

    reason: str


class MakeRoom(TransferAction, frozen=True):
    """Evict what may be: a block found no memory."""


class Ended(TransferAction, frozen=True):
    """A transfer is over: drop its unfinished blocks, and report it. Once for each."""

    transfer: Transfer


# --- the sending end ---


class SendOffer(TransferAction, frozen=True):
    """Announce a transfer to the peer, with its ticket and the list of its blocks."""

    transfer_id: bytes
    sealed: bytes
    named: NamedBlocks


class SendCommit(TransferAction, frozen=True):
    """Tell the peer how many blocks there are, and which of a pull are not here."""

    transfer_id: bytes
    num_blocks: int
    missing: tuple[BlockKey, ...]


class SendBlock(TransferAction, frozen=True):
    """Pin a block and queue it."""

    block: BlockReady
    tenant: TenantShare
    quality: Quality


class CloseQueue(TransferAction, frozen=True):
    """Close the queue of a transfer."""

    transfer_id: bytes


class Landed(TransferAction, frozen=True):
    """Let go of blocks: the peer has them."""

    transfer_id: bytes
    blocks: list[BlockReady]


class Withdraw(TransferAction, frozen=True):
    """Take what is queued of a transfer back, and let go of its blocks."""

    transfer_id: bytes
    blocks: list[BlockReady]


class Distrust(TransferAction, frozen=True):
    """The peer broke the protocol: end its connection."""

    why: str


ACTIONS: tuple[type[TransferAction], ...] = tuple(TransferAction.__subclasses__())
"""All kinds of actions; those behind `Ended` are of the sending end alone."""
RECEIVED = ACTIONS[: ACTIONS.index(Ended) + 1]
"""Those of the receiving end."""
SENT: tuple[type[TransferAction], ...] = (
    TellAbort,
    RecordRefusal,
    Ended,
    *ACTIONS[len(RECEIVED) :],
)
"""Those of the sending end."""
