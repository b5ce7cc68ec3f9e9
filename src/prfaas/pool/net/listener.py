"""Accepting connections at a pool node's TLS port, by their purpose."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

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


class Listener:
    """Accepts connections; a failure of one does not affect the others.

    Args:
        address: Host and port; port 0 takes a free one.
        new_channel: Makes the protocol of a connection that carries messages.
        on_data: Takes a data connection, nothing read yet, and closes it some day. A `PeerError`
            it raises refuses the connection.
        on_sealed: The same, for a data connection without TLS.
        on_probe: The same, for a connection of a link test.
        on_refused: Called for every caller that is not a peer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        tls: LinkContexts,
        new_channel: Callable[[], Channel],
        on_data: Callable[[socket.socket], None],
        on_sealed: Callable[[socket.socket], None],
        on_probe: Callable[[socket.socket], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._address = address
        self._tls = tls
        self._new_channel = new_channel
        self._takers = {DATA_PROTOCOL.encode(): on_data, PROBE_PROTOCOL.encode(): on_probe}
        self._on_sealed = on_sealed
        self._on_refused = on_refused
        self._said = LogThrottle()
        self._socket: socket.socket | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._callers: dict[asyncio.Task[None], socket.socket] = {}
        """Connections that are being identified, the oldest first."""

    def open(self) -> None:
        """Start to listen.

        Raises:
            OSError: The address cannot be had.
        """
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
            self._on_refused()
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
            taker = self._taker(hello)
            if taker is not None:
                taker(connection)
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
            self._on_refused()
        finally:
            if is_ours:
                connection.close()

    def _taker(self, hello: bytes) -> Callable[[socket.socket], None] | None:
        if hello == SEALED_MAGIC:
            return self._on_sealed
        return next((self._takers[name] for name in self._takers if name in hello), None)

    async def _shake_hands(self, connection: socket.socket) -> None:
        prepare_messages(connection)
        await asyncio.get_running_loop().connect_accepted_socket(
            self._new_channel,
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
