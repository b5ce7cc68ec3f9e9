"""Connections to the engines' KV events: ZeroMQ, one subscription an engine, kept up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import Deployment
from prfaas.core.blocks import Layout
from prfaas.core.prefix_index import PrefixIndex
from prfaas.errors import PeerError
from prfaas.gateway.engine_feed import EngineFeed, Heard, read_frames
from prfaas.gateway.kv_events import Batch
from prfaas.logs import log_event
from prfaas.said import SaidOnce
from prfaas.units import NS_PER_S

BATCH_BYTES_MAX = 16 << 20
"""A batch is a step: one of a million tokens in blocks of 16 has about half of this."""
QUEUED_BATCHES_MAX = 256
"""Batches of one engine that wait here; more wait in the engine, and what it drops is replayed."""
GAP_SAID_EVERY_NS = 10 * NS_PER_S
BATCHES_A_TURN = 64
"""Then the others on this thread have their turn."""
REPLAYS_MAX = 8
"""Replays in a row; an engine that publishes faster than it replays is joined in the middle."""
_OVER = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True, slots=True)
class EventTiming:
    """Times of a subscription, seconds.

    Attributes:
        backoff_s: Wait before the first attempt to connect again; doubles from there.
        backoff_max_s: Longest such wait; a connection that lasts as long lets it begin anew.
        connect_s: Limit for connecting.
        replay_s: Longest silence during a replay.
        idle_s: Silence after which the engine is asked whether something was missed.
    """

    backoff_s: float = 0.1
    backoff_max_s: float = 2.0
    connect_s: float = 5.0
    replay_s: float = 5.0
    idle_s: float = 5.0


class _GoneError(Exception):
    """The connection is over."""


class EngineClient:
    """The subscription to one engine.

    Args:
        engine: Its name.
        table: Where it publishes.
        feed: Takes what it publishes.
        layout: Its layout; None while its pool node has not announced it.
        timing: Times.
    """

    def __init__(
        self,
        engine: str,
        table: EngineTable,
        feed: EngineFeed,
        layout: Callable[[], Layout | None],
        timing: EventTiming,
    ) -> None:
        self._engine = engine
        self._endpoint = table.kv_events or ""
        self._replay_endpoint = table.kv_events_replay
        self._layout = layout
        self._context: Context | None = None
        self._timing = timing
        self._is_joined = False
        self._said = SaidOnce(every_ns=GAP_SAID_EVERY_NS)
        self.backoff_s = timing.backoff_s
        """The next wait before connecting again."""
        self.feed = feed

    async def run(self, context: Context) -> None:
        """Connect, follow, connect again; until cancelled. `context` makes the sockets."""
        self._context = context
        clock, timing = asyncio.get_running_loop().time, self._timing
        while True:
            self._is_joined, began_at = False, clock()
            layout = self._layout()
            if layout is not None:
                await self._follow_once(layout)
            # Who breaks each connection as soon as it stands is not asked more and more often.
            if self._is_joined and clock() - began_at >= timing.backoff_max_s:
                self.backoff_s = timing.backoff_s
            await asyncio.sleep(self.backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
            self.backoff_s = min(2 * self.backoff_s, timing.backoff_max_s)

    async def _follow_once(self, layout: Layout) -> None:
        # One socket is one connection: what comes out of it is of one life of the engine.
        with self._socket(zmq.SUB, self._endpoint) as socket, _monitor(socket) as monitor:
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
            finally:
                self.feed.lost()

    async def _handshake(self, monitor: Socket) -> None:
        with _Ears((monitor,)) as ears:
            while await ears.hear(self._timing.connect_s):
                for frames in _waiting(monitor, 1):
                    event = _event(frames)
                    if event & _OVER:
                        raise _GoneError("no connection")
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        return
        raise _GoneError(f"no connection after {self._timing.connect_s} s")

    async def _join(self) -> None:
        """Learn what was published before."""
        if not await self._replay():
            self.feed.start_blind()
        self._is_joined = True
        self._say(logging.INFO, "kv_events_heard", state=self.feed.state.value)

    async def _follow(self, socket: Socket, monitor: Socket) -> None:
        with _Ears((socket, monitor)) as ears:
            while True:
                if not await ears.hear(self._timing.idle_s):
                    # Silence can be the loss of the last batch; the engine knows.
                    if self._replay_endpoint is not None and not await self._replay():
                        raise _GoneError("the engine does not answer")
                    continue
                for frames in _waiting(socket, BATCHES_A_TURN):
                    seq, payload = read_frames(frames)
                    if self.feed.live(seq, payload) is Heard.GAP:
                        await self._close_gap(seq, payload)
                for frames in _waiting(monitor, BATCHES_A_TURN):
                    if _event(frames) & _OVER:
                        raise _GoneError("the connection broke")
                await asyncio.sleep(0)

    async def _close_gap(self, seq: int, payload: bytes) -> None:
        self._say_gap(seq)
        for _ in range(REPLAYS_MAX):
            if not await self._replay():
                break
            if self.feed.live(seq, payload) is not Heard.GAP:
                return
        self.feed.start_blind()
        self.feed.live(seq, payload)

    async def _replay(self) -> bool:
        """Ask for what was published since the last batch that was heard; False without answer."""
        if self._replay_endpoint is None:
            return False
        with (
            self._socket(zmq.DEALER, self._replay_endpoint) as socket,
            _Ears((socket,)) as ears,
        ):
            socket.connect(self._replay_endpoint)
            self._ask(socket)
            while await ears.hear(self._timing.replay_s):
                for frames in _waiting(socket, BATCHES_A_TURN):
                    seq, payload = read_frames(frames)
                    if seq >= 0:
                        self.feed.replayed(seq, payload)
                    elif self.feed.end_replay():
                        return True
                    else:
                        self._ask(socket)
                await asyncio.sleep(0)
        self._say(logging.WARNING, "kv_events_not_replayed", where=self._replay_endpoint)
        return False

    def _say_gap(self, seq: int) -> None:
        if self._said.is_new("kv_events_gap"):
            self._say(logging.WARNING, "kv_events_gap", before=seq)

    def _say(self, level: int, event: str, **fields: object) -> None:
        log_event(_log, level, event, engine=self._engine, **fields)

    def _ask(self, socket: Socket) -> None:
        socket.send_multipart([b"", self.feed.replay_from.to_bytes(8, "big")])
        self.feed.begin_replay()

    @contextlib.contextmanager
    def _socket(self, kind: int, endpoint: str) -> Iterator[Socket]:
        if self._context is None:
            raise RuntimeError("it does not run")
        socket = self._context.socket(kind)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            socket.setsockopt(zmq.RCVHWM, QUEUED_BATCHES_MAX)
            socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            yield socket
        finally:
            socket.close()


@contextlib.contextmanager
def _monitor(socket: Socket) -> Iterator[Socket]:
    """What becomes of a socket's connection."""
    monitor = socket.get_monitor_socket(_OVER | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


def _event(frames: list[bytes]) -> int:
    return int(parse_monitor_message(frames)["event"])


def _waiting(socket: Socket, num_max: int) -> Iterator[list[bytes]]:
    """Messages that are there."""
    for _ in range(num_max):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class _Ears:
    """Waits until one of some sockets has a message."""

    def __init__(self, sockets: Sequence[Socket]) -> None:
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._descriptors = [int(socket.fileno()) for socket in sockets]
        self._waiting: asyncio.Future[None] | None = None
        self._is_open = False

    def __enter__(self) -> _Ears:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _open(self) -> None:
        for descriptor in () if self._is_open else self._descriptors:
            self._loop.add_reader(descriptor, self._stir)
        self._is_open = True

    def _close(self) -> None:
        for descriptor in self._descriptors if self._is_open else ():
            self._loop.remove_reader(descriptor)
        self._is_open = False

    async def hear(self, timeout_s: float) -> bool:
        """Wait for a message; False when none came in time."""
        deadline = self._loop.time() + timeout_s
        # A descriptor says that something happened, not what, and says it until one looks.
        while not any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self._sockets):
            if self._loop.time() >= deadline:
                return False
            self._open()
            self._waiting = self._loop.create_future()
            timer = self._loop.call_at(deadline, self._stir)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        return True

    def _stir(self) -> None:
        if self._waiting is None:
            # Nobody listens now; the descriptor would stir the loop again and again.
            self._close()
        elif not self._waiting.done():
            self._waiting.set_result(None)


class EngineEvents:
    """The KV events of all engines that publish them.

    Args:
        deployment: Who there is.
        index: Follows what they hold.
        layout: Layout of an engine by its pool and name; None while it is not announced.
        on_batch: Told of every batch that is applied, with the engine's name.
        timing: Times of the subscriptions.
    """

    def __init__(
        self,
        deployment: Deployment,
        index: PrefixIndex,
        layout: Callable[[str, str], Layout | None],
        on_batch: Callable[[str, Batch], None],
        timing: EventTiming | None = None,
    ) -> None:
        tables = {
            name: table
            for cluster in deployment.clusters.values()
            for name, table in cluster.engines.items()
        }
        self._context: Context | None = None
        self._clients = {
            name: EngineClient(
                name,
                table,
                EngineFeed(name, index, partial(on_batch, name)),
                partial(layout, table.pool, name),
                timing or EventTiming(),
            )
            for name, table in tables.items()
            if table.kv_events is not None
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to connect."""
        if self._clients:
            self._context = zmq.Context()
            runs = [client.run(self._context) for client in self._clients.values()]
            self._tasks = [asyncio.create_task(run) for run in runs]

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def names(self) -> list[str]:
        """Engines that are followed."""
        return list(self._clients)
