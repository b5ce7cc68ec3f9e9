"""Pool and pool, over TLS. Gateways send `Pull` and `Abort` too."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import (
    Blocks,
    Codecs,
    Count,
    Key,
    LayoutId,
    Name,
    PullKeys,
    Takes,
    Text,
    TicketBytes,
    TransferId,
)

SECRET_BYTES_MAX = 64
CONNECTIONS_MAX = 1 << 16


class PoolHello(Message, tag="pool_hello"):
    """First message on a link; the name has to be the one in the certificate.

    `resumes` are the sender's open transfers: what else was open over an earlier connection is
    over. `link` is a word of the sender's that its data connections repeat. `codecs` are those
    that it could code blocks with; an older pool names none, and sends raw. `encryptions`
    are protections of data connections that it can use beside TLS, the preferred first; an older
    pool names none, and uses TLS. `takes` has the messages that the receiver may send.
    """

    pool: Name
    epoch: Text
    link: Name
    resumes: list[TransferId] = msgspec.field(default_factory=list)
    codecs: Codecs = msgspec.field(default_factory=list)
    encryptions: Codecs = msgspec.field(default_factory=list)
    takes: Takes = msgspec.field(default_factory=list)


class Join(Message, tag="join"):
    """First message on a data connection: which link it belongs to. Fragments follow."""

    pool: Name
    link: Text
    number: Count = 0


class Resumed(Message, tag="resumed"):
    """Answer to `PoolHello`, after an `Arrived`, `Committed` or `Abort` for what is resumed.

    `encryption` is the protection of the hello that data connections of this session use, empty for
    TLS; `secret` is what their keys are made of (`wire/sealed/keys.py`). `takes_ages` allows ages
    in fragments; an older pool refuses them. `connections` is the most data connections that the
    link may have; 0 from an older pool.
    """

    epoch: Text
    takes_ages: bool = False
    encryption: Text = ""
    secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES_MAX)] = b""
    connections: Count = 0

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Resumed(epoch={self.epoch!r}, encryption={self.encryption!r})"


class Decodes(Message, tag="decodes"):
    """Fragments on this link may be coded by these codecs of the hello from now on.

    Sent to a peer whose hello has codecs, once they are ready here. Without it all goes raw.
    """

    codecs: Codecs


class Connections(Message, tag="connections"):
    """The most data connections that the link may have from now on: other peers came or left.

    More are closed.
    """

    num_max: Annotated[int, msgspec.Meta(ge=1, le=CONNECTIONS_MAX)]


class Arrived(Message, tag="arrived"):
    """These blocks of a transfer are in the receiver's store."""

    transfer_id: TransferId
    layout_id: LayoutId
    keys: list[Key]


class Committed(Message, tag="committed"):
    """Every block of the transfer arrived."""

    transfer_id: TransferId


class Offer(Message, tag="offer"):
    """Blocks of this transfer follow, if the ticket allows it. They need not wait for the answer.

    `blocks` is the list of the signed ticket: other blocks are refused. Repeating it, as
    after a lost connection, changes nothing while the transfer is open.
    """

    transfer_id: TransferId
    ticket: TicketBytes = b""
    blocks: Blocks = msgspec.field(default_factory=dict)


class Accepted(Message, tag="accepted"):
    """Answer to `Offer`: blocks of this transfer are taken."""

    transfer_id: TransferId


class Refused(Message, tag="refused"):
    """Answer to `Offer`: blocks of this transfer are dropped."""

    transfer_id: TransferId
    reason: Text


class Commit(Message, tag="commit"):
    """This transfer has that many blocks; it is committed when all of them arrived.

    `missing` were asked for by a `Pull`, and are not there.
    """

    transfer_id: TransferId
    num_blocks: Count
    missing: PullKeys = msgspec.field(default_factory=list)


class Abort(Message, tag="abort"):
    """This transfer is over without a commit. Pools and gateways send it.

    `reason` is for people.
    """

    transfer_id: TransferId
    kind: TransferEnd = TransferEnd.ABORTED
    reason: Text = ""

    def __post_init__(self) -> None:
        """Reject a commit, which only the receiver of all blocks can state."""
        if self.kind is TransferEnd.COMMITTED:
            raise ValueError("an abort with the end committed")


class Release(Message, tag="release"):
    """Notice from a gateway to the destination that no request waits for the blocks of this
    transfer.

    The transfer continues: its blocks are kept like other blocks.
    """

    transfer_id: TransferId


class Ahead(StrEnum):
    """Pull of blocks that an engine has yet to compute."""

    NO = ""
    COMPUTING = "computing"
    """The source sends each block once its engine has stored it."""
    COMPUTED = "computed"
    """Second message of the same transfer, without keys: the engine has answered, and stores the
    rest at once or never."""


class Pull(Message, tag="pull"):
    """Fetch these blocks from `source`, as a transfer that the ticket allows.

    `blocks` is the list that the ticket was signed for; `keys` are those of them that are lacking.
    A peer that does not know `ahead` sends what it has, and ignores the second message.
    """

    transfer_id: TransferId
    source: Name
    keys: PullKeys
    ticket: TicketBytes = b""
    blocks: Blocks = msgspec.field(default_factory=dict)
    ahead: Ahead = Ahead.NO


def all_computed(transfer_id: bytes, source: str) -> Pull:
    """Return the second message of a pull that began as `COMPUTING`."""
    return Pull(transfer_id=transfer_id, source=source, keys=[], ahead=Ahead.COMPUTED)


class Missing(Message, tag="missing"):
    """Answer to `Pull`: the source does not have these; it sends the others."""

    transfer_id: TransferId
    keys: PullKeys
