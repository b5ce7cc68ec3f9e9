"""ZeroMQ sockets on the event loop: one connection each, monitored and read without a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

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
