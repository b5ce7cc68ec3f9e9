"""The life of a transfer, as a table.

A transfer moves the blocks of one prompt from the pool of a PrfaaS cluster to a pool of a PD
cluster. Both ends keep one `Transfer` each and feed it the same events:

    OPEN ──commit──► COMMITTED
      ├────abort───► ABORTED      cancelled, refused, link lost
      └────expire──► EXPIRED      the deadline passed

The three ends are final: late and duplicate events change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TransferState(StrEnum):
    """Where a transfer is in its life."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"


class TransferEvent(StrEnum):
    """What can happen to a transfer."""

    COMMIT = "commit"
    ABORT = "abort"
    EXPIRE = "expire"


TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.OPEN, TransferEvent.COMMIT): TransferState.COMMITTED,
    (TransferState.OPEN, TransferEvent.ABORT): TransferState.ABORTED,
    (TransferState.OPEN, TransferEvent.EXPIRE): TransferState.EXPIRED,
}


@dataclass(slots=True)
class Transfer:
    """One end's view of a transfer.

    Attributes:
        transfer_id: 16 random bytes, chosen by the gateway.
        peer: Name of the pool at the other end.
        opened_at_ns: When this end first heard of it.
        deadline_ns: When it expires.
        state: Where it is in its life.
        reason: Why it ended as it did; empty while open or after a plain commit.
        num_blocks: Blocks moved so far.
        num_bytes: Payload bytes moved so far.
        last_block_at_ns: When the last block was moved; 0 before the first.
    """

    transfer_id: bytes
    peer: str
    opened_at_ns: int
    deadline_ns: int
    state: TransferState = TransferState.OPEN
    reason: str = ""
    num_blocks: int = 0
    num_bytes: int = 0
    last_block_at_ns: int = 0

    @property
    def is_open(self) -> bool:
        """Whether blocks may still be moved."""
        return self.state is TransferState.OPEN

    def moved(self, num_bytes: int, now_ns: int) -> None:
        """Account for one block."""
        self.num_blocks += 1
        self.num_bytes += num_bytes
        self.last_block_at_ns = now_ns

    def apply(self, event: TransferEvent, reason: str = "") -> bool:
        """Advance the state.

        Returns:
            Whether the state changed; False for anything that comes after the end.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            return False
        self.state, self.reason = following, reason
        return True
