"""Events for gateways: a snapshot, then every change in order.

Blocks come and go by the hundred, and what changes in one turn of the event loop goes together: a
message costs more than the blocks it names.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.wire.channel import Channel
from prfaas.wire.messages.codec import OfGateway, tags_of
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import (
    Evicted,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    TransferEnded,
)

Event = Stored | Evicted | TransferEnded | PoolState


class Names(Protocol):
    """A store whose blocks are in the snapshot."""

    def names(self) -> Iterator[BlockName]:
        """Names of all its blocks."""


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Limits on events for one subscriber."""

    keys_max: int = 4096
    """Keys per message: about 200 kB."""
    backlog_bytes_max: int = 64 << 20
    """Unsent events; beyond it the subscriber is dropped."""
    backlog_keys_max: int = 4_000_000
    """Keys in the events that wait for the end of a snapshot; beyond it the subscriber is
    dropped."""


LIMITS = FeedLimits()


class EventFeed:
    """Numbers events and sends them to every subscriber.

    A subscriber that is too far behind is dropped and takes a new snapshot when it comes back.

    Args:
        limits: On events for one subscriber.

    Attributes:
        epoch: Changes with every start of the pool node, so that an old sequence is not mistaken
            for the present one.
    """

    def __init__(self, limits: FeedLimits = LIMITS) -> None:
        self._limits = limits
        self.epoch = secrets.token_hex(8)
        self._next_seq = 0
        self._subscribers: dict[Channel, _Subscriber] = {}
        self._changed: dict[BlockName, bool] = {}
        """Added (True) or removed blocks that are not reported yet."""
        self._telling: asyncio.Handle | None = None

    def subscribe(self, channel: Channel, store: Names, state: Callable[[], PoolState]) -> None:
        """Send a snapshot, as fast as it is read, then every later change.

        Asking again over the same channel changes nothing.
        """
        if channel in self._subscribers:
            return
        self._tell_changes()
        subscriber = _Subscriber(
            channel, self.epoch, self._next_seq, list(store.names()), self._limits
        )
        self._subscribers[channel] = subscriber
        self._emit(state())

    @property
    def num_subscribers(self) -> int:
        """Subscribed gateways."""
        return len(self._subscribers)

    def unsubscribe(self, channel: Channel) -> None:
        """Remove a subscriber; no effect if it is unknown."""
        subscriber = self._subscribers.pop(channel, None)
        if subscriber is not None:
            subscriber.stop()

    # --- StoreObserver ---

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks came."""
        self._change(layout_id, keys, came=True)

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        """Blocks went."""
        self._change(layout_id, keys, came=False)

    # --- other events ---

    def transfer_ended(self, event: TransferEnded) -> None:
        """A transfer ended at this pool."""
        self._emit(event)

    def state_changed(self, state: PoolState) -> None:
        """An engine or a link came or went, or a busy link was measured."""
        self._emit(state)

    def _change(self, layout_id: bytes, keys: list[BlockKey], *, came: bool) -> None:
        if not self._subscribers:
            return
        for key in keys:
            self._changed[layout_id, key] = came
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_soon(self._tell_changes)

    def _tell_changes(self) -> None:
        """Send pending changes; for a block that changed several times only the last one."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        changed, self._changed = self._changed, {}
        alike: dict[tuple[bool, bytes], list[BlockKey]] = {}
        for (layout_id, key), came in changed.items():
            alike.setdefault((came, layout_id), []).append(key)
        for (came, layout_id), keys in sorted(alike.items()):
            kind = Stored if came else Evicted
            for start in range(0, len(keys), self._limits.keys_max):
                part = wire_keys(keys[start : start + self._limits.keys_max])
                self._send(kind(seq=0, layout_id=layout_id, keys=part))

    def _emit(self, event: Event) -> None:
        """Send an event, behind all changes before it."""
        self._tell_changes()
        self._send(event)

    def _send(self, event: Event) -> None:
        event.seq = self._next_seq
        self._next_seq += 1
        for subscriber in list(self._subscribers.values()):
            subscriber.tell(event)


class _Subscriber:
    """One gateway: events wait until its snapshot has left."""

    def __init__(
        self,
        channel: Channel,
        epoch: str,
        next_seq: int,
        names: list[BlockName],
        limits: FeedLimits,
    ) -> None:
        self._channel = channel
        self._limits = limits
        self._waiting: deque[Event] = deque()
        self._num_waiting_keys = 0
        self._has_caught_up = False
        self._task = asyncio.create_task(self._catch_up(epoch, next_seq, names))

    def stop(self) -> None:
        """Send no more."""
        self._task.cancel()

    def tell(self, event: Event) -> None:
        """Send an event, in its turn."""
        if self._has_caught_up:
            self._channel.send(event)
            if self._channel.backlog_bytes > self._limits.backlog_bytes_max:
                self._channel.close("the subscriber does not keep up with events")
            return
        self._waiting.append(event)
        if isinstance(event, Stored | Evicted):
            self._num_waiting_keys += len(event.keys)
        if self._num_waiting_keys > self._limits.backlog_keys_max:
            self._channel.close("the subscriber does not keep up with the snapshot")

    async def _catch_up(self, epoch: str, next_seq: int, names: list[BlockName]) -> None:
        """The snapshot, then pending events, no faster than they are read."""
        rest = iter(names)
        while part := list(islice(rest, self._limits.keys_max)):
            for layout_id, same in groupby(part, key=lambda name: name[0]):
                keys = wire_keys(key for _, key in same)
                self._channel.send(
                    Snapshot(epoch=epoch, next_seq=next_seq, layout_id=layout_id, keys=keys)
                )
            # The others on this thread have their turn, and the subscriber reads.
            await asyncio.sleep(0)
            await self._channel.drained()
        self._channel.send(SnapshotEnd(epoch=epoch, next_seq=next_seq, takes=tags_of(OfGateway)))
        while self._waiting:
            self._channel.send(self._waiting.popleft())
            await self._channel.drained()
        self._has_caught_up = True
