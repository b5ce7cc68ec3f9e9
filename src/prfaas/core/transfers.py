"""The life of a transfer, as a table.

A transfer moves the blocks of one prompt from one pool to another. Both ends keep one `Transfer`
each and feed it the same events:

    OFFERED ──accept──► ACCEPTED ──send──► SENT ──commit──► COMMITTED
       └──────────────send─────────────────►┘

    OFFERED, ACCEPTED, SENT ──refuse──► REFUSED     its ticket does not allow it
                            ──abort───► ABORTED     given up, link lost
                            ──expire──► EXPIRED     its time is over

`send` means that the sender has said how many blocks there are; it need not wait for the answer to
its offer, so blocks are on their way a round trip earlier. Only the receiver commits, when every
block is there; the sender commits when it is told. The four ends are final, and whoever ends a
transfer lets go of all it held for it; late and duplicate events change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TransferState(StrEnum):
    """Where a transfer is in its life."""

    OFFERED = "offered"
    ACCEPTED = "accepted"
    SENT = "sent"
    COMMITTED = "committed"
    REFUSED = "refused"
    ABORTED = "aborted"
    EXPIRED = "expired"


class TransferEvent(StrEnum):
    """What can happen to a transfer."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    SEND = "send"
    COMMIT = "commit"
    ABORT = "abort"
    EXPIRE = "expire"


_S, _E = TransferState, TransferEvent
TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (_S.OFFERED, _E.ACCEPT): _S.ACCEPTED,
    (_S.OFFERED, _E.SEND): _S.SENT,
    (_S.ACCEPTED, _E.SEND): _S.SENT,
    (_S.SENT, _E.COMMIT): _S.COMMITTED,
    **{
        (state, event): end
        for state in (_S.OFFERED, _S.ACCEPTED, _S.SENT)
        for event, end in (
            (_E.REFUSE, _S.REFUSED),
            (_E.ABORT, _S.ABORTED),
            (_E.EXPIRE, _S.EXPIRED),
        )
    },
}
ENDS = frozenset({_S.COMMITTED, _S.REFUSED, _S.ABORTED, _S.EXPIRED})
"""States that nothing follows."""


@dataclass(slots=True)
class Transfer:
    """One end's view of a transfer.

    Attributes:
        transfer_id: 16 random bytes, chosen by the gateway.
        peer: Name of the pool at the other end.
        opened_at_ns: When this end first heard of it.
        deadline_ns: When it expires.
        layout_id: The layout of all its blocks.
        bytes_max: Payload bytes that its ticket allows.
        state: Where it is in its life.
        reason: Why it ended as it did; empty while open or after a plain commit.
        num_blocks: Blocks moved so far.
        num_bytes: Payload bytes moved so far.
        last_block_at_ns: When the last block was moved; 0 before the first.
        num_missing: Blocks of a pull that the source does not have.
        trace: W3C context of its ticket; empty if nobody traces it.
        first_block_at_ns: When the first block was moved; 0 before it.
    """

    transfer_id: bytes
    peer: str
    opened_at_ns: int
    deadline_ns: int
    layout_id: bytes = b""
    bytes_max: int = 0
    state: TransferState = TransferState.OFFERED
    reason: str = ""
    num_blocks: int = 0
    num_bytes: int = 0
    last_block_at_ns: int = 0
    num_missing: int = 0
    trace: str = ""
    first_block_at_ns: int = 0

    @property
    def is_open(self) -> bool:
        """Whether blocks may still be moved."""
        return self.state not in ENDS

    def moved(self, num_bytes: int, now_ns: int) -> None:
        """Account for one block."""
        self.num_blocks += 1
        self.num_bytes += num_bytes
        self.last_block_at_ns = now_ns
        if not self.first_block_at_ns:
            self.first_block_at_ns = now_ns

    def apply(self, event: TransferEvent, reason: str = "") -> bool:
        """Advance the state.

        Returns:
            Whether the state changed; False for what is late or comes a second time.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            return False
        self.state = following
        self.reason = reason if following in ENDS else ""
        return True
