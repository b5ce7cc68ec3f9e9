"""The unix socket at which local engines hand over and take back blocks.

An engine maps its host-memory KV cache from a file and passes the file's descriptor here, so blocks
are copied between that memory and the store without going through a socket (`engine_memory.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import select
import socket
from bisect import insort
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from prfaas.core.kv.blocks import BlockKey, GroupKind, Layout
from prfaas.errors import ConfigError, PeerError
from prfaas.logs import log_event
from prfaas.pool.engine.engine_memory import EngineMemory
from prfaas.tasks import cancel_all
from prfaas.wire.channel import PING_INTERVAL_S, Channel
from prfaas.wire.frames import Frame, FrameDecoder, VersionError
from prfaas.wire.messages.base import Goodbye, Ping
from prfaas.wire.messages.codec import AnyMessage, decode, encode
from prfaas.wire.messages.engine import EngineHello
from prfaas.wire.messages.fields import Key, keys_of

log = logging.getLogger(__name__)


HELLO_BYTES_MAX = 1 << 20
ACCEPT_RETRY_S = 0.1
"""For instance without free file descriptors: some are released soon."""


class EngineSession:
    """One connection of an engine.

    Args:
        number: Connections that were accepted before this one.
    """

    def __init__(self, name: str, number: int, hello: EngineHello, memory: EngineMemory) -> None:
        self.name = name
        self.number = number
        self.hello = hello
        self.memory = memory
        self.channel: Channel | None = None

    @property
    def layout(self) -> Layout:
        """The layout its blocks are named in."""
        return self.memory.layout

    def has_state(self, group: int) -> bool:
        """Return True if the blocks of a cache group are linear state."""
        groups = self.layout.groups
        return any(g.index == group and g.kind is GroupKind.LINEAR_STATE for g in groups)

    def named_rows(self, keys: list[Key], rows: list[int]) -> list[tuple[BlockKey, int]]:
        """Keys with their rows.

        Raises:
            PeerError: There are not as many of one as of the other, or no such groups or rows.
        """
        if len(keys) != len(rows):
            raise PeerError(f"{len(keys)} keys for {len(rows)} rows")
        named = list(zip(keys_of(keys), rows, strict=True))
        for key, row in named:
            self.memory.check(key, row)
        return named

    @property
    def has_left(self) -> bool:
        """Return True if the engine has hung up, also if there is more to read of what it said
        before.

        From then on its rows are its own again: what was read of them before stays good, and
        nothing may be written to them. Any thread may ask.
        """
        channel = self.channel
        connection = channel.socket if channel is not None else None
        if connection is None:
            return True
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))


class EngineHandler(Protocol):
    """Serves engines."""

    def came(self, engine: EngineSession) -> None:
        """An engine has sent its hello."""

    def handle(self, engine: EngineSession, message: AnyMessage) -> None:
        """Act on one message.

        Raises:
            PeerError: The engine broke the protocol: its session ends.
        """

    def left(self, engine: EngineSession) -> None:
        """An engine has disconnected."""


class EnginePort:
    """Accepts engines on a unix socket.

    Args:
        path: Of the socket; only the owner may connect.
        hello_timeout_s: Time limit for the first message of an engine.
    """

    def __init__(self, path: Path, handler: EngineHandler, hello_timeout_s: float) -> None:
        self._path, self._handler = path, handler
        self._hello_timeout_s = hello_timeout_s
        self._sessions: set[EngineSession] = set()
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Make the socket; ConfigError if it cannot be made."""
        self._listener = self._listen()

    def close(self) -> None:
        """Remove the socket, and leave every engine."""
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        for session in list(self._sessions):
            if session.channel is not None:
                session.channel.close("this pool node stops")

    async def run(self) -> None:
        """Accept until cancelled."""
        if self._listener is None:
            raise RuntimeError("the port is not open")
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = {asyncio.create_task(self._ping())}
        numbers = itertools.count()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    log.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                task = asyncio.create_task(self._welcome(connection, next(numbers)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            await cancel_all(tasks)

    async def _ping(self) -> None:
        """Ping engines. They need not answer: a scheduler may be busy."""
        while True:
            for session in self._sessions:
                if session.channel is not None:
                    session.channel.send(Ping())
            await asyncio.sleep(PING_INTERVAL_S)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_left_over(self._path)
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen()
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"engines cannot be awaited at {self._path}: {error.strerror or error}; "
                "name another path for the socket"
            ) from None
        listener.setblocking(False)
        return listener

    async def _welcome(self, connection: socket.socket, number: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            hello, descriptor = await loop.run_in_executor(
                None, _receive_hello, connection, self._hello_timeout_s
            )
            memory = EngineMemory(descriptor, hello)
            session = EngineSession(hello.engine, number, hello, memory)
        except (PeerError, OSError) as error:
            log.warning("engine refused: %s", error)
            if isinstance(error, VersionError):
                _tell(connection, error)
            connection.close()
            return
        except asyncio.CancelledError:
            # Wakes the thread that waits for the hello.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            raise
        connection.setblocking(False)
        self._sessions.add(session)
        self._handler.came(session)
        _, session.channel = await loop.connect_accepted_socket(
            lambda: Channel(
                lambda _, frame: self._deliver(session, frame),
                lambda _, reason: self._closed(session, reason),
            ),
            connection,
        )
        session.channel.send(Ping())

    def _deliver(self, session: EngineSession, frame: Frame) -> None:
        self._handler.handle(session, decode(frame.payload))

    def _closed(self, session: EngineSession, reason: str) -> None:
        log_event(log, logging.INFO, "engine_gone", engine=session.name, why=reason)
        session.memory.close()
        self._sessions.discard(session)
        self._handler.left(session)


def _tell(connection: socket.socket, error: VersionError) -> None:
    """Send goodbye in the engine's version of the protocol; it may have disconnected."""
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(encode(Goodbye(reason=str(error)), error.version))


def _remove_left_over(path: Path) -> None:
    """Remove the socket that a killed pool node left at `path`; nothing else; OSError if something
    else is there, or a process that serves."""
    if not path.is_socket():
        if path.exists():
            raise OSError(errno.EEXIST, "something that is no socket is there")
        path.unlink(missing_ok=True)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another process serves there")


def _receive_hello(connection: socket.socket, timeout_s: float) -> tuple[EngineHello, int]:
    """Read the hello and the descriptor that comes with its first byte. Blocks."""
    connection.settimeout(timeout_s)
    descriptors: list[int] = []
    try:
        frames = _first_frames(connection, descriptors)
        frame = frames[0]
        message = decode(frame.payload)
        if len(frames) > 1 or not isinstance(message, EngineHello) or len(descriptors) != 1:
            raise PeerError("the first message of an engine has to be hello, with one descriptor")
    except (PeerError, OSError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors[0]


def _first_frames(connection: socket.socket, descriptors: list[int]) -> list[Frame]:
    decoder = FrameDecoder(control_bytes_max=HELLO_BYTES_MAX)
    while True:
        data, received, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        descriptors += received
        if not data:
            raise PeerError("the engine disconnected before its hello")
        frames = decoder.feed(data)
        if frames:
            return frames


class ConnectedEngines(Mapping[str, EngineSession]):
    """The present connection of each engine.

    A pool node that stalled finds several hellos of one engine: those of connections that the
    engine has given up, and that of the present one. They are read by several threads, so they
    arrive here in any order; the connection that was accepted last is the present one, and the end
    of another one changes nothing.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, list[EngineSession]] = {}
        """Open connections by name, in the order in which they were accepted."""

    def __getitem__(self, name: str) -> EngineSession:
        """Return the present connection of an engine."""
        return self._sessions[name][-1]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._sessions)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._sessions)

    def add(self, session: EngineSession) -> None:
        """Register a connection. Two engines of one name are both served, and reported."""
        others = self._sessions.setdefault(session.name, [])
        if others and session.number > others[-1].number and not others[-1].has_left:
            log_event(log, logging.WARNING, "engine_name_taken", engine=session.name)
        insort(others, session, key=lambda each: each.number)

    def remove(self, session: EngineSession) -> bool:
        """Remove a connection; return True if its engine has another one now, or none."""
        sessions = self._sessions.get(session.name, [])
        if session not in sessions:
            return False
        was_present = sessions[-1] is session
        sessions.remove(session)
        if not sessions:
            del self._sessions[session.name]
        return was_present
