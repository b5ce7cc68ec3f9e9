"""Accepting connections at a pool node's TLS port, by their purpose."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Protocol

from prometheus_client import Counter

from prfaas.errors import PeerError, words_of
from prfaas.log_throttle import LogThrottle
from prfaas.pool.net.tls_sockets import HANDSHAKE_TIMEOUT_S, readable
from prfaas.tasks import cancel_all
from prfaas.wire.channel import Channel
from prfaas.wire.identity import DATA_PROTOCOL, PROBE_PROTOCOL, LinkContexts
from prfaas.wire.sealed.records import MAGIC as SEALED_MAGIC
from prfaas.wire.sockets import prepare_messages

log = logging.getLogger(__name__)

BACKLOG = 128
ACCEPT_RETRY_S = 0.1
"""For instance without free file descriptors: some are released soon."""
REFUSED_BYTES = 1 << 16
CALLERS_MAX = 512
"""Limit of callers without identification; above it the oldest is closed. A good
one is in after two round trips, so it takes thousands of bad ones a second to keep it out."""
TLS_HANDSHAKE, TLS_HEADER_BYTES = 0x16, 5


class PortUser(Protocol):
    """Takes the connections of a port by their purpose.

    It closes those it takes some day; nothing is read of them yet. A `PeerError` refuses one.
    """

    def new_channel(self) -> Channel:
        """Return the protocol of a connection that carries messages."""

    def take_data(self, connection: socket.socket, *, is_sealed: bool) -> None:
        """Take a data connection; one that is sealed has no TLS."""

    def take_probe(self, connection: socket.socket) -> None:
        """Take a connection of a link test."""


class Listener:
    """Accepts connections; a failure of one does not affect the others.

    Args:
        address: Host and port; port 0 takes a free one.
        refused: Counts callers that are not a peer.
    """

    def __init__(
        self, address: tuple[str, int], tls: LinkContexts, user: PortUser, refused: Counter
    ) -> None:
        self._address, self._tls, self._user, self._refused = address, tls, user, refused
        self._said = LogThrottle()
        self._socket: socket.socket | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._callers: dict[asyncio.Task[None], socket.socket] = {}
        """Connections that are being identified, the oldest first."""

    def open(self) -> None:
        """Start to listen; OSError if the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._socket = socket.create_server(self._address, family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        if self._socket is None:
            raise RuntimeError("the port is not open")
        port: int = self._socket.getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and close connections that are not accepted yet."""
        if self._resting is not None:
            self._resting.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        await cancel_all(self._callers)

    def _look_at(self, connection: socket.socket) -> None:
        if len(self._callers) >= CALLERS_MAX:
            with contextlib.suppress(OSError):
                self._callers.pop(next(iter(self._callers))).shutdown(socket.SHUT_RDWR)
            self._refused.inc()
        task = asyncio.create_task(self._admit(connection))
        self._callers[task] = connection
        task.add_done_callback(self._looked_at)

    def _looked_at(self, task: asyncio.Task[None]) -> None:
        connection = self._callers.pop(task, None)
        if connection is not None and task.cancelled():
            connection.close()  # It may not even have begun.

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. Not awaited, so that an accepted connection is not lost."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("no connection can be accepted: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            self._resting = loop.call_later(
                ACCEPT_RETRY_S, loop.add_reader, listener, self._accept, listener
            )
            return
        self._look_at(connection)

    async def _admit(self, connection: socket.socket) -> None:
        is_ours = True
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await client_hello(connection)
            if hello == SEALED_MAGIC or DATA_PROTOCOL.encode() in hello:
                self._user.take_data(connection, is_sealed=hello == SEALED_MAGIC)
                is_ours = False
            elif PROBE_PROTOCOL.encode() in hello:
                self._user.take_probe(connection)
                is_ours = False
            else:
                is_ours = False  # The transport closes it, also when the handshake fails.
                await self._shake_hands(connection)
        except ConnectionResetError:
            log.debug("a peer disconnected before its identification")
        except (OSError, PeerError) as error:
            reason = words_of(error)
            if self._said.is_new(reason):
                log.warning("connection refused: %s", reason)
            self._refused.inc()
        finally:
            if is_ours:
                connection.close()

    async def _shake_hands(self, connection: socket.socket) -> None:
        prepare_messages(connection)
        await asyncio.get_running_loop().connect_accepted_socket(
            self._user.new_channel,
            connection,
            ssl=self._tls.messages,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )


async def client_hello(connection: socket.socket) -> bytes:
    """The first TLS record of a connection, or SEALED_MAGIC of one without TLS, left unread.

    ALPN names the caller's protocol unencrypted, before the handshake.

    Raises:
        PeerError: It is no TLS.
        ConnectionResetError: The caller left.
    """
    connection.setblocking(False)
    wanted = TLS_HEADER_BYTES
    while True:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        await readable(connection)
        data = connection.recv(wanted, socket.MSG_PEEK)
        if data.startswith(SEALED_MAGIC):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return SEALED_MAGIC
        if data and data[0] != TLS_HANDSHAKE:
            connection.recv(REFUSED_BYTES)  # Unread data would turn the close into a reset.
            raise PeerError(f"a caller starts with {data!r}, which is no TLS")
        if len(data) < wanted:
            raise ConnectionResetError("a peer disconnected before its hello")
        if wanted > TLS_HEADER_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return data
        wanted += int.from_bytes(data[3:5], "big")
