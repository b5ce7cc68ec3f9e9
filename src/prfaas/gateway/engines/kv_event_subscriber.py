"""Subscriptions to the engines' KV events, one an engine, kept up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import zmq

from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import Deployment
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.errors import PeerError
from prfaas.gateway.engines.kv_event_stream import (
    BatchResult,
    Context,
    EngineFeed,
    Socket,
    SocketPoller,
    is_over,
    one_connection,
    read_frames,
    stands,
    waiting,
    watched,
)
from prfaas.log_throttle import LogThrottle
from prfaas.logs import log_event
from prfaas.tasks import Backoff, cancel_all
from prfaas.units import NS_PER_S
from prfaas.wire.kv_events import KvEventBatch

BATCH_BYTES_MAX = 16 << 20
"""A batch is a step: one of a million tokens in blocks of 16 has about half of this."""
QUEUED_BATCHES_MAX = 256
"""Batches of one engine that wait here; more wait in the engine, and what it drops is replayed."""
BATCHES_A_TURN = 64
"""Then the others on this thread have their turn."""
REPLAYS_MAX = 8
"""Replays in a row; an engine that publishes faster than it replays is joined in the middle."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventTiming:
    """Times of a subscription, seconds."""

    backoff_s: float = 0.1
    """Wait before the first attempt to connect again; doubles from there."""
    backoff_max_s: float = 2.0
    """Longest such wait; a connection that lasts as long lets it begin anew."""
    connect_s: float = 5.0
    replay_s: float = 5.0
    """Longest silence during a replay."""
    settle_s: float = 0.1
    """First silence after which the engine is asked whether something was missed; doubles up to
    `idle_s`. A publisher drops what it sends before it has processed a new subscription, which can
    be after it has answered the replay."""
    idle_s: float = 5.0
    gap_logged_every_s: float = 10.0
    """Least time between two log lines about gaps."""


class SubscriptionFault(StrEnum):
    """A fault of a subscription, as the metric counts it."""

    LOST = "lost"
    """A connection over which the engine was followed ended."""
    GAP = "gap"
    """Batches were missing between two that came."""
    NOT_REPLAYED = "not_replayed"
    """The engine did not answer a request for a replay."""


class SubscriptionObserver:
    """Observer of subscriptions; this one notes nothing."""

    def applied(self, engine: str, batch: KvEventBatch) -> None:
        """A batch of an engine was applied."""

    def failed(self, engine: str, fault: SubscriptionFault) -> None:
        """A subscription to an engine has failed."""


class _GoneError(Exception):
    """The connection is over."""


class EngineClient:
    """The subscription to one engine.

    Args:
        feed: Takes what it publishes.
        layout: Its layout; None while its pool node has not announced it.
    """

    def __init__(
        self,
        engine: str,
        table: EngineTable,
        feed: EngineFeed,
        layout: Callable[[], Layout | None],
        observer: SubscriptionObserver,
        timing: EventTiming,
    ) -> None:
        self._engine = engine
        self._endpoint = table.kv_events or ""
        self._replay_endpoint = table.kv_events_replay
        self._layout = layout
        self._observer = observer
        self._context: Context | None = None
        self._is_joined = False
        self._said = LogThrottle(every_ns=round(timing.gap_logged_every_s * NS_PER_S))
        self.backoff = Backoff(timing.backoff_s, timing.backoff_max_s)
        self.feed = feed
        self.timing = timing

    async def run(self, context: Context) -> None:
        """Connect, follow, connect again; until cancelled. `context` makes the sockets."""
        self._context = context
        clock, timing = asyncio.get_running_loop().time, self.timing
        while True:
            self._is_joined, began_at = False, clock()
            layout = self._layout()
            if layout is not None:
                await self._follow_once(layout)
            # An engine that breaks each new connection is dialled ever more rarely.
            if self._is_joined and clock() - began_at >= timing.backoff_max_s:
                self.backoff.reset()
            await self.backoff.pause()

    async def _follow_once(self, layout: Layout) -> None:
        # One socket is one connection: what comes out of it is of one life of the engine.
        with self._socket(zmq.SUB, self._endpoint) as socket, watched(socket) as monitor:
            socket.subscribe(b"")
            try:
                socket.connect(self._endpoint)
                await self._handshake(monitor)
                self.feed.connected(layout)
                await self._join()
                await self._follow(socket, monitor)
            except (_GoneError, zmq.ZMQError, PeerError) as error:
                level = logging.WARNING if self._is_joined else logging.DEBUG
                self._say(level, "kv_events_lost", why=str(error) or repr(error))
                if self._is_joined:
                    self._failed(SubscriptionFault.LOST)
            finally:
                self.feed.lost()

    async def _handshake(self, monitor: Socket) -> None:
        with SocketPoller((monitor,)) as poller:
            while await poller.hear(self.timing.connect_s):
                for frames in waiting(monitor, 1):
                    if is_over(frames):
                        raise _GoneError("no connection")
                    if stands(frames):
                        return
        raise _GoneError(f"no connection after {self.timing.connect_s} s")

    async def _join(self) -> None:
        """Learn what was published before."""
        if not await self._replay():
            self.feed.start_blind()
        self._is_joined = True
        self._say(logging.INFO, "kv_events_heard", state=self.feed.state.value)

    async def _follow(self, socket: Socket, monitor: Socket) -> None:
        silence_s = self.timing.settle_s
        with SocketPoller((socket, monitor)) as poller:
            while True:
                if not await poller.hear(silence_s):
                    # Silence can be the loss of the last batch; the engine knows.
                    if self._replay_endpoint is not None and not await self._replay():
                        raise _GoneError("the engine does not answer")
                    silence_s = min(2 * silence_s, self.timing.idle_s)
                    continue
                for frames in waiting(socket, BATCHES_A_TURN):
                    seq, payload = read_frames(frames)
                    if self.feed.live(seq, payload) is BatchResult.GAP:
                        await self._close_gap(seq, payload)
                for frames in waiting(monitor, BATCHES_A_TURN):
                    if is_over(frames):
                        raise _GoneError("the connection broke")
                await asyncio.sleep(0)

    async def _close_gap(self, seq: int, payload: bytes) -> None:
        self._failed(SubscriptionFault.GAP)
        self._say_gap(seq)
        for _ in range(REPLAYS_MAX):
            if not await self._replay():
                break
            if self.feed.live(seq, payload) is not BatchResult.GAP:
                return
        self.feed.start_blind()
        self.feed.live(seq, payload)

    async def _replay(self) -> bool:
        """Request a replay since the last received batch; False without answer."""
        if self._replay_endpoint is None:
            return False
        with (
            self._socket(zmq.DEALER, self._replay_endpoint) as socket,
            SocketPoller((socket,)) as poller,
        ):
            socket.connect(self._replay_endpoint)
            self._ask(socket)
            while await poller.hear(self.timing.replay_s):
                for frames in waiting(socket, BATCHES_A_TURN):
                    seq, payload = read_frames(frames)
                    if seq >= 0:
                        self.feed.replayed(seq, payload)
                    elif self.feed.end_replay():
                        return True
                    else:
                        self._ask(socket)
                await asyncio.sleep(0)
        self._say(logging.WARNING, "kv_events_not_replayed", where=self._replay_endpoint)
        self._failed(SubscriptionFault.NOT_REPLAYED)
        return False

    def _failed(self, fault: SubscriptionFault) -> None:
        self._observer.failed(self._engine, fault)

    def _say_gap(self, seq: int) -> None:
        if self._said.is_new("kv_events_gap"):
            self._say(logging.WARNING, "kv_events_gap", before=seq)

    def _say(self, level: int, event: str, **fields: object) -> None:
        log_event(_log, level, event, engine=self._engine, **fields)

    def _ask(self, socket: Socket) -> None:
        socket.send_multipart([b"", self.feed.replay_from.to_bytes(8, "big")])
        self.feed.begin_replay()

    def _socket(self, kind: int, endpoint: str) -> AbstractContextManager[Socket]:
        if self._context is None:
            raise RuntimeError("it does not run")
        return one_connection(
            self._context,
            kind,
            endpoint,
            messages_max=QUEUED_BATCHES_MAX,
            bytes_max=BATCH_BYTES_MAX,
        )


class EngineEvents:
    """The KV events of all engines that publish them.

    Args:
        index: Follows what they hold.
        layout: Layout of an engine by its pool and name; None while it is not announced.
        timing: Times of the subscriptions.
    """

    def __init__(
        self,
        deployment: Deployment,
        index: PrefixIndex,
        layout: Callable[[str, str], Layout | None],
        observer: SubscriptionObserver,
        timing: EventTiming | None = None,
    ) -> None:
        self._context: Context | None = None
        self._index, self._layout = index, layout
        self._observer, self._timing = observer, timing or EventTiming()
        self._clients: dict[str, EngineClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for cluster in deployment.clusters.values():
            for name, table in cluster.engines.items():
                self._know(name, table)

    def _know(self, name: str, table: EngineTable) -> None:
        if table.kv_events is not None:
            self._clients[name] = EngineClient(
                name,
                table,
                EngineFeed(name, self._index, partial(self._observer.applied, name)),
                partial(self._layout, table.pool, name),
                self._observer,
                self._timing,
            )

    def start(self) -> None:
        """Begin to connect."""
        for name in self._clients:
            self._run(name)

    def add(self, name: str, table: EngineTable) -> None:
        """Follow an engine that joins, if it publishes."""
        self._know(name, table)
        if name in self._clients:
            self._run(name)

    def remove(self, name: str) -> None:
        """Follow an engine no more."""
        if self._clients.pop(name, None) is not None:
            self._tasks.pop(name).cancel()

    def _run(self, name: str) -> None:
        self._context = self._context or zmq.Context()
        self._tasks[name] = asyncio.create_task(self._clients[name].run(self._context))

    async def close(self) -> None:
        """Close all connections."""
        await cancel_all(self._tasks.values())
        if self._context is not None:
            self._context.destroy(linger=0)

    def forgotten(self, name: str) -> None:
        """An engine has dropped all its blocks.

        Its own event of that comes late: vLLM publishes in steps, and an idle engine makes none.
        """
        if name in self._clients and self._index.is_live(name):
            self._index.begin_snapshot(name)
            self._index.end_snapshot(name)

    def names(self) -> list[str]:
        """Engines that are followed."""
        return list(self._clients)
