"""An engine's connection to its pool node, for code that must never wait.

vLLM calls a tier from its scheduler loop. Everything here that the tier calls returns at once: two
threads of their own do the socket work. When the pool node is gone, or silent for too long, all
its open requests fail immediately, and the connection is dialled again in the background. The
connection is shut before a failure is reported: a pool node that continues later sees that before
it touches a row.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import PeerError
from prfaas.log_throttle import LogThrottle
from prfaas.wire.channel import SILENCE_MAX_S
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.messages.base import Goodbye, Message, Ping, Unsupported
from prfaas.wire.messages.codec import AnyMessage, UnknownMessageError, decode, encode
from prfaas.wire.messages.engine import EngineHello

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Times and limits of an engine's connection."""

    retry_s: float = 0.2
    """Wait before a lost connection is dialled again, seconds."""
    silence_s: float = SILENCE_MAX_S
    """A pool node pings every second; after this silence it counts as dead."""
    outbox_max: int = 100_000
    """Messages not yet written; a pool node that far behind is treated as gone."""


LIMITS = ClientLimits()


class PoolConnection:
    """Keeps one connection to the pool node.

    Args:
        path: The pool node's unix socket.
        hello: First message of this engine.
        descriptor: Of the engine's shared memory; stays the caller's.
        on_message: Called from the reader thread with every answer.
        on_lost: Called from the reader thread when the connection is gone.
        limits: Times and limits of the connection.
    """

    def __init__(
        self,
        path: Path,
        hello: EngineHello,
        descriptor: int,
        on_message: Callable[[AnyMessage], None],
        on_lost: Callable[[], None],
        limits: ClientLimits = LIMITS,
    ) -> None:
        self._limits = limits
        self._path = path
        self._hello = encode(hello)
        self._descriptor = os.dup(descriptor)
        self._on_message = on_message
        self._on_lost = on_lost
        self._connected = threading.Event()
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self._outbox: queue.Queue[bytes | None] = queue.Queue(limits.outbox_max)
        self._said = LogThrottle()
        self._thread = threading.Thread(target=self._run, name="prfaas-pool", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Return True if the pool node has accepted this engine."""
        return self._connected.is_set()

    def send(self, message: Message) -> bool:
        """Queue a message.

        Returns:
            False if there is no connection or the queue is full: nothing will come of it.
        """
        # Taken before the check: what is put into the box of a connection that ends meanwhile is
        # dropped with it, and cannot reach the next one after its failure was reported.
        outbox = self._outbox
        if not self.is_connected:
            return False
        try:
            outbox.put_nowait(encode(message))
        except queue.Full:
            self.hang_up()
            return False
        return True

    def hang_up(self) -> None:
        """Shut the connection: open requests fail, and the pool node touches no row any more.

        It is dialled again in the background.
        """
        connection = self._socket
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("hanging up: %s", error)

    def close(self) -> None:
        """End the connection and the threads."""
        self._stopped.set()
        self.hang_up()
        self._thread.join(timeout=5)
        os.close(self._descriptor)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._converse()
            except OSError as error:
                log.debug("pool node at %s: %s", self._path, error)
            except PeerError as error:
                if self._said.is_new(str(error)):
                    log.warning("the pool node at %s cannot be used: %s", self._path, error)
            if self._connected.is_set():
                self._connected.clear()
                if not self._stopped.is_set():
                    log.warning("the pool node at %s is gone", self._path)
                self._on_lost()
            self._stopped.wait(self._limits.retry_s)

    def _converse(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._limits.silence_s)
        with connection:
            connection.connect(str(self._path))
            socket.send_fds(connection, [self._hello], [self._descriptor])
            self._outbox = queue.Queue(self._limits.outbox_max)
            self._socket = connection
            if self._stopped.is_set():
                return  # Closed before there was anything to hang up.
            writer = threading.Thread(
                target=_write,
                args=(connection, self._outbox),
                name="prfaas-pool-writer",
                daemon=True,
            )
            writer.start()
            try:
                self._read(connection)
            finally:
                # Closing alone would leave the writer in a send that a full socket holds up.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                self._socket = None
                _end(self._outbox)
                writer.join()

    def _read(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        while data := connection.recv(1 << 18):
            for frame in decoder.feed(data):
                try:
                    message = decode(frame.payload)
                except UnknownMessageError as error:
                    self.send(error.answer)  # The pool node is newer, and goes on without.
                    continue
                if isinstance(message, Goodbye):
                    raise PeerError(message.reason)
                if isinstance(message, Unsupported):
                    raise PeerError(f"it is of an older version and does not know {message.kind}")
                if not self.is_connected:
                    log.info("connected to the pool node at %s", self._path)
                    self._connected.set()
                if not isinstance(message, Ping):
                    self._on_message(message)


def _end(outbox: queue.Queue[bytes | None]) -> None:
    """Wake the writer for the last time; what a full queue holds cannot be sent any more."""
    while True:
        try:
            outbox.put_nowait(None)
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                outbox.get_nowait()
        else:
            return


def _write(connection: socket.socket, outbox: queue.Queue[bytes | None]) -> None:
    while (data := outbox.get()) is not None:
        try:
            connection.sendall(data)
        except OSError:
            # No more messages can be sent: the reader ends, too.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return
