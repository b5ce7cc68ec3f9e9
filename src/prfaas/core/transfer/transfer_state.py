"""The life of a transfer, as a table.

A transfer moves the blocks of one prompt from one pool to another. Both ends keep one `Transfer`
each and feed it the same events:

    OFFERED ──accept──► ACCEPTED ──send──► SENT ──committed──► COMMITTED
       └──────────────send─────────────────►┘

    OFFERED, ACCEPTED, SENT ──refused──────────► REFUSED
                            ──expired──────────► EXPIRED
                            ──any other end────► ABORTED

An end (`TransferEnd`) is the event and the reason in one: pools send it to each other when one of
them gives a transfer up, and to gateways, which label fallbacks and feed the link's breaker by it.

`send` means that the sender has said how many blocks there are; it need not wait for the answer to
its offer, so blocks are in transit a round trip earlier. Only the receiver commits, when every
block is there; the sender commits when it is told. The four ends are final, and whoever ends a
transfer lets go of all it held for it; late and duplicate events change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TransferState(StrEnum):
    """State of a transfer."""

    OFFERED = "offered"
    ACCEPTED = "accepted"
    SENT = "sent"
    COMMITTED = "committed"
    REFUSED = "refused"
    ABORTED = "aborted"
    EXPIRED = "expired"


class TransferEvent(StrEnum):
    """Progress of a transfer that continues."""

    ACCEPT = "accept"
    SEND = "send"


class TransferEnd(StrEnum):
    """End of a transfer. The values are part of the protocol and label metrics."""

    COMMITTED = "committed"
    """Every block is there."""
    REFUSED = "refused"
    """Its ticket does not allow it, or not all that was sent."""
    EXPIRED = "expired"
    """The lifetime of its ticket is over."""
    LINK_LOST = "link_lost"
    """The link broke, and did not come back within the grace time; or there was none."""
    PEER_RESTARTED = "peer_restarted"
    """The pool at the other end came back without what it had known."""
    NOT_WANTED = "not_wanted"
    """The receiving pool does not know a transfer of which blocks come."""
    MISCOUNTED = "miscounted"
    """More blocks came than were announced."""
    NO_ROOM = "no_room"
    """There was no memory for a block."""
    ENGINE_LOST = "engine_lost"
    """The engine that computes the blocks is gone."""
    PURGED = "purged"
    """Blocks of the source are being purged."""
    ABORTED = "aborted"
    """The gateway gave it up."""

    @property
    def state(self) -> TransferState:
        """The final state that this end leads to."""
        try:
            return TransferState(self.value)
        except ValueError:
            return TransferState.ABORTED


LINK_FAULTS = frozenset(
    {
        TransferEnd.REFUSED,
        TransferEnd.EXPIRED,
        TransferEnd.LINK_LOST,
        TransferEnd.PEER_RESTARTED,
        TransferEnd.NOT_WANTED,
        TransferEnd.MISCOUNTED,
        TransferEnd.NO_ROOM,
    }
)
"""Ends that count against the link, its two pools included. A lost engine has a breaker of its own;
a purge and a request that was aborted are nobody's fault."""

_S = TransferState
TRANSITIONS: dict[tuple[TransferState, TransferEvent | TransferEnd], TransferState] = {
    (_S.OFFERED, TransferEvent.ACCEPT): _S.ACCEPTED,
    (_S.OFFERED, TransferEvent.SEND): _S.SENT,
    (_S.ACCEPTED, TransferEvent.SEND): _S.SENT,
    (_S.SENT, TransferEnd.COMMITTED): _S.COMMITTED,
    **{
        (state, end): end.state
        for state in (_S.OFFERED, _S.ACCEPTED, _S.SENT)
        for end in TransferEnd
        if end is not TransferEnd.COMMITTED
    },
}
ENDS = frozenset({_S.COMMITTED, _S.REFUSED, _S.ABORTED, _S.EXPIRED})
"""States that nothing follows."""


@dataclass(slots=True)
class Transfer:
    """One end's view of a transfer."""

    transfer_id: bytes
    """16 random bytes, chosen by the gateway."""
    peer: str
    """Name of the pool at the other end."""
    opened_at_ns: int
    """Time of its first message at this end."""
    deadline_ns: int
    layout_id: bytes = b""
    """The layout of all its blocks."""
    bytes_max: int = 0
    """Payload bytes that its ticket allows."""
    state: TransferState = TransferState.OFFERED
    """Its place in its life."""
    end: TransferEnd | None = None
    """Its end; None while open."""
    detail: str = ""
    """More of how it ended, for people; may be empty."""
    num_blocks: int = 0
    """Blocks moved so far."""
    num_bytes: int = 0
    """Payload bytes moved so far."""
    last_block_at_ns: int = 0
    """Time when the last block was moved; 0 before the first."""
    num_missing: int = 0
    """Blocks of a pull that the source does not have."""
    trace: str = ""
    """W3C context of its ticket; empty if nobody traces it."""
    first_block_at_ns: int = 0
    """Time when the first block was moved; 0 before it."""

    @property
    def is_open(self) -> bool:
        """Return True if blocks may still be moved."""
        return self.state not in ENDS

    @property
    def reason(self) -> str:
        """Reason of its end, for people; empty while open or after a commit."""
        if self.end is None or self.end is TransferEnd.COMMITTED:
            return ""
        return self.detail or self.end.value

    def moved(self, num_bytes: int, now_ns: int) -> None:
        """Account for one block."""
        self.num_blocks += 1
        self.num_bytes += num_bytes
        self.last_block_at_ns = now_ns
        if not self.first_block_at_ns:
            self.first_block_at_ns = now_ns

    def apply(self, event: TransferEvent | TransferEnd, detail: str = "") -> bool:
        """Advance the state, or end the transfer.

        Returns:
            Whether the state changed; False for what is late or comes a second time.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            return False
        self.state = following
        if isinstance(event, TransferEnd):
            self.end, self.detail = event, detail
        return True
