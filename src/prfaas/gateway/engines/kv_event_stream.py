"""One engine's KV events, checked for order and applied to the index without I/O, and its sockets.

An engine publishes numbered batches and keeps the last some thousands for a replay; there is no
snapshot. What the index knows of its device memory is

- EXACT if every batch was received since the first one, or since the cache was cleared;
- INCOMPLETE if only the end was received: a hit is certain, there may be more;
- DEGRADED while the connection is broken.

The last batch identifies the run of an engine: a replay that begins with the same bytes continues
it, any other replay is of another run and restarts the stream.

The ZeroMQ sockets live on the event loop: one connection each, monitored and read without a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from zlib import crc32

import zmq
from zmq.utils.monitor import parse_monitor_message

from prfaas.core.kv.block_table import tails_of
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.prefix_index import PrefixIndex, SourceState, Tier
from prfaas.errors import PeerError
from prfaas.wire.kv_events import KvEventBatch, decode_batch

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
_OVER = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@contextlib.contextmanager
def one_connection(
    context: Context, kind: int, endpoint: str, *, messages_max: int, bytes_max: int
) -> Iterator[Socket]:
    """A socket that makes one connection, and no other when that is over.

    Args:
        endpoint: Where it will be connected to.
        bytes_max: Of a message; a longer one ends the connection.
    """
    socket = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.RCVHWM, messages_max)
        socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        yield socket
    finally:
        socket.close()


@contextlib.contextmanager
def watched(socket: Socket) -> Iterator[Socket]:
    """Events of a socket's connection: messages for `stands` and `is_over`."""
    monitor = socket.get_monitor_socket(_OVER | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


def stands(frames: list[bytes]) -> bool:
    """Return True if a message of `watched` reports a connection."""
    return _event(frames) == zmq.EVENT_HANDSHAKE_SUCCEEDED


def is_over(frames: list[bytes]) -> bool:
    """Return True if a message of `watched` reports a lost or failed connection."""
    return bool(_event(frames) & _OVER)


def _event(frames: list[bytes]) -> int:
    return int(parse_monitor_message(frames)["event"])


def waiting(socket: Socket, num_max: int) -> Iterator[list[bytes]]:
    """Messages that are there."""
    for _ in range(num_max):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class SocketPoller:
    """Waits until one of some sockets has a message."""

    def __init__(self, sockets: Sequence[Socket]) -> None:
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._descriptors = [int(socket.fileno()) for socket in sockets]
        self._waiting: asyncio.Future[None] | None = None
        self._is_open = False

    def __enter__(self) -> SocketPoller:
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
        # A descriptor signals an event without its kind, until the events are read.
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


class BatchResult(Enum):
    """Result of a batch."""

    APPLIED = auto()
    KNOWN = auto()
    """It is a duplicate."""
    GAP = auto()
    """Earlier ones are missing: it was not applied, a replay is needed."""


class EngineFeed:
    """Known blocks in one engine's device memory.

    Args:
        engine: Its name, which is the name of the source in the index.
        index: Follows its blocks.
        on_batch: Called for every batch that is applied.
    """

    def __init__(
        self,
        engine: str,
        index: PrefixIndex,
        on_batch: Callable[[KvEventBatch], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._index = index
        self._on_batch = on_batch
        self._layout: Layout | None = None
        self._last: tuple[int, tuple[int, int]] | None = None
        self._next_seq = 0
        self._is_replayed = False
        """True if the running replay has been joined to the known batches."""
        self._is_other = False
        """True if it comes from a restarted engine, or does not reach back to the known batches."""
        self._may_overlap = False
        """True if the next batch may be older than the end of the replay."""

    @property
    def state(self) -> SourceState:
        """State of the index of the engine."""
        return self._index.state(self._engine)

    @property
    def replay_from(self) -> int:
        """First batch to request: the last that was received, which shows if the run continues."""
        return self._last[0] if self._last else 0

    def connected(self, layout: Layout) -> None:
        """A connection stands; batches are named by this layout from here on."""
        if self._layout is not None and self._layout.layout_id != layout.layout_id:
            self._forget()
        self._layout = layout

    def lost(self) -> None:
        """The connection is gone."""
        self._index.lose(self._engine)

    # With a replay

    def begin_replay(self) -> None:
        """A replay from `replay_from` was asked for."""
        self._is_replayed = self._is_other = False

    def replayed(self, seq: int, payload: bytes) -> None:
        """The next batch of the replay; PeerError if it is no batch."""
        if not self._is_replayed:
            self._is_replayed = True
            if (seq, _digest(payload)) == self._last:
                self._index.resume(self._engine)
                return
            self._is_other = self._last is not None
            if not self._is_other:
                self._start(seq, complete=seq == 0)
        if seq == self._next_seq and not self._is_other:
            self._apply(seq, payload)

    def end_replay(self) -> bool:
        """There is no more.

        Returns:
            False if what was known does not go on: it is forgotten, and a replay of everything has
            to be asked for.
        """
        if self._is_other or (not self._is_replayed and self._last is not None):
            self._forget()
            return False
        if not self._is_replayed:
            # Nothing was published yet.
            self._start(0, complete=True)
        self._may_overlap = True
        return True

    # Without a replay, and live

    def start_blind(self) -> None:
        """There is no replay: continue with whatever comes, as if nothing had been known."""
        self._start(-1, complete=False)

    def live(self, seq: int, payload: bytes) -> BatchResult:
        """The next batch that was published; PeerError if it is no batch."""
        if self._next_seq < 0:
            self._start(seq, complete=seq == 0)
        if seq < self._next_seq and self._may_overlap:
            return BatchResult.KNOWN
        if seq < self._next_seq:
            # Behind a proxy the engine can begin anew while the connection stays.
            self._forget()
            return BatchResult.GAP
        if seq > self._next_seq:
            return BatchResult.GAP
        self._may_overlap = False
        self._apply(seq, payload)
        return BatchResult.APPLIED

    # Steps

    def _forget(self) -> None:
        self._index.begin_snapshot(self._engine)
        self._last, self._next_seq = None, 0

    def _start(self, seq: int, *, complete: bool) -> None:
        """Know nothing, from batch `seq` on; -1 takes any."""
        self._forget()
        self._next_seq = seq
        self._index.end_snapshot(self._engine, complete=complete)

    def _apply(self, seq: int, payload: bytes) -> None:
        layout = self._layout
        if layout is None:
            raise RuntimeError("a batch before the connection")
        batch = decode_batch(payload)
        if batch.cleared:
            self._index.begin_snapshot(self._engine)
            self._index.end_snapshot(self._engine)
        if batch.hashes:
            ends = tails_of(batch.hashes)
            self._index.change(self._engine, layout.layout_id, ends, batch.runs, Tier.DEVICE)
        self._last, self._next_seq = (seq, _digest(payload)), seq + 1
        self._on_batch(batch)


def _digest(payload: bytes) -> tuple[int, int]:
    """Identity of a batch: the time of its creation."""
    return len(payload), crc32(payload)


def read_frames(frames: list[bytes]) -> tuple[int, bytes]:
    """Number and content of a published or replayed batch; the number is -1 at a replay's end;
    PeerError if the frames are not those of a batch."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise PeerError(f"{len(frames)} frames that are no batch of KV events")
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
