"""Transfers that arrive at this pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from prfaas.core.transfers import Transfer, TransferEvent
from prfaas.errors import PeerError
from prfaas.pool.metrics import PoolMetrics
from prfaas.pool.store import BlockStore
from prfaas.wire.frames import BlockFrame
from prfaas.wire.messages import Commit

TRANSFERS_MAX = 10_000
"""Ended transfers remembered, so that late lookups and frames are recognised."""


class InboundTransfers:
    """Receives blocks and knows which are still on their way.

    Args:
        store: Where blocks go.
        on_ended: Told once of every transfer that ended.
        clock_ns: Monotonic clock, nanoseconds.
        lifetime_ns: How long a transfer may stay open.
    """

    def __init__(
        self,
        store: BlockStore,
        metrics: PoolMetrics,
        on_ended: Callable[[Transfer], None],
        clock_ns: Callable[[], int],
        lifetime_ns: int,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._on_ended = on_ended
        self._clock_ns = clock_ns
        self._lifetime_ns = lifetime_ns
        self._transfers: OrderedDict[bytes, Transfer] = OrderedDict()

    def offered(self, transfer_id: bytes, peer: str) -> None:
        """A peer announced a transfer; announcing it twice is harmless."""
        if transfer_id not in self._transfers:
            now = self._clock_ns()
            self._remember(Transfer(transfer_id, peer, now, now + self._lifetime_ns))

    def block(self, frame: BlockFrame, peer: str) -> bool:
        """A block arrived: keep it if it is what it says it is.

        Returns:
            Whether more blocks of its transfer are wanted.

        Raises:
            PeerError: The block fails its digest; the connection can not be trusted.
        """
        if not frame.is_intact:
            self._metrics.blocks_dropped.labels(reason="digest").inc()
            raise PeerError(f"block {frame.key.block_hash.hex()[:12]} from {peer} fails its digest")
        transfer = self._transfers.get(frame.transfer_id)
        if transfer is None or not transfer.is_open or transfer.peer != peer:
            self._metrics.blocks_dropped.labels(reason="late").inc()
            return False
        if not self._store.put(frame.layout_id, frame.key, frame.data, frame.digest):
            self._metrics.blocks_dropped.labels(reason="no_room").inc()
            self._end(transfer, TransferEvent.ABORT, "no_room")
            return False
        transfer.moved(len(frame.data), self._clock_ns())
        self._metrics.link_bytes.labels(peer=peer, direction="received").inc(len(frame.data))
        return True

    def committed(self, commit: Commit, peer: str) -> None:
        """The peer sent all it has."""
        transfer = self._transfers.get(commit.transfer_id)
        if transfer is None or transfer.peer != peer:
            return
        if transfer.num_blocks == commit.num_blocks:
            self._end(transfer, TransferEvent.COMMIT)
        else:
            missing = commit.num_blocks - transfer.num_blocks
            self._end(transfer, TransferEvent.ABORT, f"{missing} blocks missing")

    def aborted(self, transfer_id: bytes, reason: str) -> None:
        """Somebody gave the transfer up. What arrived stays: every block is good by itself."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            now = self._clock_ns()
            transfer = Transfer(transfer_id, "", now, now)
            self._remember(transfer)
        self._end(transfer, TransferEvent.ABORT, reason)

    def aborted_by(self, transfer_id: bytes, peer: str, reason: str) -> None:
        """The sending pool gave one of its transfers up."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.peer == peer:
            self._end(transfer, TransferEvent.ABORT, reason)

    def peer_lost(self, peer: str) -> None:
        """The link to `peer` broke: nothing more of its transfers will come."""
        for transfer in list(self._transfers.values()):
            if transfer.peer == peer:
                self._end(transfer, TransferEvent.ABORT, "link_lost")

    def expire(self) -> None:
        """End what has been open for too long."""
        now = self._clock_ns()
        for transfer in list(self._transfers.values()):
            if transfer.is_open and now >= transfer.deadline_ns:
                self._end(transfer, TransferEvent.EXPIRE, "lifetime")

    def is_on_its_way(self, transfer_id: bytes, peer_connected: bool) -> bool:
        """Whether a block that is not here may still come with this transfer.

        Args:
            transfer_id: The transfer a decode request waits for.
            peer_connected: Whether the link to its source stands: a transfer nobody has announced
                yet is on its way only then.
        """
        transfer = self._transfers.get(transfer_id)
        return peer_connected if transfer is None else transfer.is_open

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return sum(transfer.is_open for transfer in self._transfers.values())

    def _end(self, transfer: Transfer, event: TransferEvent, reason: str = "") -> None:
        if transfer.apply(event, reason):
            self._on_ended(transfer)

    def _remember(self, transfer: Transfer) -> None:
        self._transfers[transfer.transfer_id] = transfer
        while len(self._transfers) > TRANSFERS_MAX:
            _, oldest = self._transfers.popitem(last=False)
            self._end(oldest, TransferEvent.EXPIRE, "too many transfers")
