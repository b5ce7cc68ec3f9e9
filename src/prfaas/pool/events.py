"""What a pool node tells its gateways: a snapshot, then every change in order."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from prfaas.core.blocks import BlockKey
from prfaas.pool.store import BlockStore
from prfaas.wire.channel import Channel
from prfaas.wire.messages import (
    Evicted,
    Message,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    TransferEnded,
    wire_keys,
)

SNAPSHOT_KEYS = 4096
"""Keys per snapshot message: about 200 kB."""


BACKLOG_BYTES_MAX = 64 << 20
"""Unsent events a subscriber may have before it is dropped."""


class EventFeed:
    """Numbers events and sends them to every subscriber.

    A subscriber that is too far behind is dropped and takes a new snapshot when it comes back.

    Attributes:
        epoch: Changes with every start of the pool node, so that an old sequence is not mistaken
            for the present one.
    """

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        self._next_seq = 0
        self._subscribers: list[Channel] = []

    def subscribe(self, channel: Channel, store: BlockStore, state: PoolState) -> None:
        """Send everything there is, then every change."""
        for message in self._snapshot(store):
            channel.send(message)
        channel.send(SnapshotEnd(epoch=self.epoch, next_seq=self._next_seq))
        self.unsubscribe(channel)
        self._subscribers.append(channel)
        self._emit(state)

    def unsubscribe(self, channel: Channel) -> None:
        """Forget a subscriber; harmless if it is none."""
        if channel in self._subscribers:
            self._subscribers.remove(channel)

    # --- StoreObserver ---

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks came."""
        self._emit(Stored(seq=0, layout_id=layout_id, keys=wire_keys(keys)))

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks went."""
        self._emit(Evicted(seq=0, layout_id=layout_id, keys=wire_keys(keys)))

    # --- other events ---

    def transfer_ended(self, event: TransferEnded) -> None:
        """A transfer ended at this pool."""
        self._emit(event)

    def state_changed(self, state: PoolState) -> None:
        """An engine or a link came or went, or a busy link was measured."""
        self._emit(state)

    def _emit(self, event: Stored | Evicted | TransferEnded | PoolState) -> None:
        event.seq = self._next_seq
        self._next_seq += 1
        for channel in list(self._subscribers):
            channel.send(event)
            if channel.backlog_bytes > BACKLOG_BYTES_MAX:
                channel.close("the subscriber does not keep up with events")

    def _snapshot(self, store: BlockStore) -> Iterator[Message]:
        by_layout: dict[bytes, list[tuple[int, bytes]]] = {}
        for layout_id, key in store.names():
            by_layout.setdefault(layout_id, []).append((key.group, key.block_hash))
        for layout_id, keys in by_layout.items():
            for start in range(0, len(keys), SNAPSHOT_KEYS):
                yield Snapshot(
                    epoch=self.epoch,
                    next_seq=self._next_seq,
                    layout_id=layout_id,
                    keys=keys[start : start + SNAPSHOT_KEYS],
                )
