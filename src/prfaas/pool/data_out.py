"""The data connections of a link, sending end: a thread each, fed from one shared queue.

Bytes are encrypted and written by blocking sockets on threads of their own, which is quicker than
on an event loop and keeps the loop free for control. Everything a thread has to tell it tells on
the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable

from prfaas.core.link_share import BlockName, Fragment, LinkShare, OutgoingBlock
from prfaas.errors import PeerError
from prfaas.wire.fragments import PREFIX_BYTES, encode_fragment
from prfaas.wire.identity import peer_name
from prfaas.wire.messages import Join, encode
from prfaas.wire.sockets import TcpInfo, hang_up, prepare, tcp_info

log = logging.getLogger(__name__)

FRAGMENT_BYTES = 128 << 10
"""Small enough that a block crosses on all connections at once, and that an urgent one waits for
little; large enough that its header and its turn in the queue do not count."""
CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.5
STUCK_NS = 5 * 10**9
"""A connection of which nothing arrives for so long carries nothing more."""


class SendQueue:
    """A `LinkShare` that threads wait at.

    Args:
        on_taken: Called from the taking thread with the bytes that go out.
    """

    def __init__(self, on_taken: Callable[[int], None]) -> None:
        self._share = LinkShare(FRAGMENT_BYTES)
        self._changed = threading.Condition()
        self._closed: set[int] = set()
        self._on_taken = on_taken

    def add(self, block: OutgoingBlock) -> None:
        """Queue a block."""
        with self._changed:
            self._share.add(block)
            self._changed.notify_all()

    def finish(self, transfer_id: bytes) -> None:
        """Nothing more of this transfer will be added."""
        with self._changed:
            self._share.finish(transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """Forget a transfer."""
        with self._changed:
            self._share.drop(transfer_id)

    def arrived(self, transfer_id: bytes, name: BlockName) -> None:
        """The receiver has this block."""
        with self._changed:
            self._share.arrived(transfer_id, name)

    def close(self, connection: int) -> None:
        """This connection takes nothing more."""
        with self._changed:
            self._closed.add(connection)
            self._changed.notify_all()

    def lost(self, connection: int) -> None:
        """What was in flight on this connection goes again; its number may not be used again."""
        with self._changed:
            self._share.lost(connection)
            self._closed.discard(connection)
            self._changed.notify_all()

    def take(self, connection: int) -> Fragment | None:
        """Wait for something to send.

        Returns:
            None once the connection was closed.
        """
        with self._changed:
            while connection not in self._closed:
                fragment = self._share.take(connection)
                if fragment is not None:
                    self._on_taken(fragment.num_bytes)
                    return fragment
                self._changed.wait()
        return None

    @property
    def queued_bytes(self) -> int:
        """Waiting for a connection."""
        return self._share.queued_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Sent, and not known to have arrived."""
        with self._changed:
            return self._share.in_flight_bytes


class _DataConnection:
    """One connection; made, used and ended by its thread, closed by the loop."""

    def __init__(self, senders: DataSenders, number: int) -> None:
        self.number = number
        self.socket: socket.socket | None = None
        self.is_open = False
        self._sent_bytes = 0
        self._received_bytes = 0
        self._moved_at_ns = 0
        self._senders = senders
        self.thread = threading.Thread(target=self._run, name=f"prfaas-data-{number}", daemon=True)

    def kill(self) -> None:
        """End it, whatever its thread does now."""
        self._senders.queue.close(self.number)
        if self.socket is not None:
            hang_up(self.socket)

    def is_stuck(self, received_bytes: int, now_ns: int) -> bool:
        """Whether the peer, which has so many bytes of it, waits in vain for the others.

        A path can be dead and acknowledge: what a proxy or a peer's kernel took has not arrived.
        """
        has_moved = received_bytes != self._received_bytes or received_bytes == self._sent_bytes
        if has_moved or not self._moved_at_ns:
            self._received_bytes, self._moved_at_ns = received_bytes, now_ns
        return now_ns - self._moved_at_ns >= STUCK_NS

    def _run(self) -> None:
        reason = "closed"
        try:
            connection = self._dial()
            self._senders.tell(self._senders.opened, self)
            buffer = bytearray(PREFIX_BYTES + FRAGMENT_BYTES)
            view = memoryview(buffer)
            while (fragment := self._senders.queue.take(self.number)) is not None:
                num_bytes = encode_fragment(fragment, buffer)
                self._sent_bytes += num_bytes
                connection.sendall(view[:num_bytes])
        except (OSError, PeerError) as error:
            reason = str(error) or repr(error)
        if not self._senders.tell(self._senders.ended, self, reason) and self.socket is not None:
            self.socket.close()

    def _dial(self) -> socket.socket:
        senders = self._senders
        connection = _connect(senders.address, senders.pacing_bytes_per_s)
        self.socket = connection
        if senders.is_closed:
            raise OSError("the link is being closed")
        secured = senders.tls.wrap_socket(connection, do_handshake_on_connect=False)
        self.socket = secured  # before the handshake, so that `kill` can end that as well
        secured.do_handshake()
        peer_name(secured, frozenset({senders.peer}))
        secured.sendall(encode(Join(pool=senders.pool, link=senders.link, number=self.number)))
        secured.settimeout(None)
        return secured


class DataSenders:
    """Keeps a number of data connections to a peer open, for one session of a link.

    Args:
        address: Of the peer.
        tls: Context whose ALPN says that this is a data connection.
        peer: Name in the peer's certificate.
        pool: Our own name.
        link: Word of the session.
        queue: What they send.
        num_connections: How many.
        budget_bits_per_s: Of all together; 0 is no limit.
        on_change: Told on the loop when a connection comes or goes.
    """

    def __init__(
        self,
        *,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        peer: str,
        pool: str,
        link: str,
        queue: SendQueue,
        numbers: Callable[[], int],
        num_connections: int,
        budget_bits_per_s: int,
        on_change: Callable[[], None],
    ) -> None:
        self.address = address
        self.tls = tls
        self.peer = peer
        self.pool = pool
        self.link = link
        self.queue = queue
        self.pacing_bytes_per_s = budget_bits_per_s // 8 // num_connections
        self.is_closed = False
        self.failure = ""
        """Why the last connection ended."""
        self._numbers = numbers
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._connections: set[_DataConnection] = set()
        self._retries: set[asyncio.TimerHandle] = set()
        for _ in range(num_connections):
            self._start()

    @property
    def num_open(self) -> int:
        """Connections that carry blocks."""
        return sum(connection.is_open for connection in self._connections)

    @property
    def connections(self) -> list[int]:
        """Numbers of those that stand or are being made."""
        return [connection.number for connection in self._connections]

    def received(self, num_bytes: dict[int, int], now_ns: int) -> None:
        """The peer said what it has of each connection: replace those that are stuck."""
        for connection in self._connections:
            if connection.is_open:
                received_bytes = num_bytes.get(connection.number, 0)
                if connection.is_stuck(received_bytes, now_ns):
                    connection.kill()

    def tcp_infos(self) -> list[TcpInfo]:
        """What the kernel knows of each connection."""
        infos: list[TcpInfo] = []
        for connection in self._connections:
            if connection.is_open and connection.socket is not None:
                with contextlib.suppress(OSError):
                    infos.append(tcp_info(connection.socket))
        return infos

    async def close(self) -> None:
        """End every connection and wait for the threads."""
        self.is_closed = True
        for handle in self._retries:
            handle.cancel()
        connections = list(self._connections)
        for connection in connections:
            connection.kill()
        try:
            await asyncio.to_thread(_join_all, [connection.thread for connection in connections])
        finally:
            for connection in connections:
                self.ended(connection, "closed")

    def tell(self, what: Callable[..., None], *about: object) -> bool:
        """Have something done on the loop; False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(what, *about)
        except RuntimeError:
            return False
        return True

    def opened(self, connection: _DataConnection) -> None:
        """On the loop: a connection stands."""
        if connection not in self._connections or connection.socket is None or self.is_closed:
            return
        connection.is_open = True
        # The peer says nothing on a data connection: what can be read is its end.
        self._loop.add_reader(connection.socket, self._peer_ended, connection)
        self._on_change()

    def ended(self, connection: _DataConnection, reason: str) -> None:
        """On the loop: a connection is gone. Harmless the second time."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self.failure = reason
        if connection.is_open and connection.socket is not None:
            self._loop.remove_reader(connection.socket)
        connection.is_open = False
        if connection.socket is not None:
            connection.socket.close()
        self.queue.lost(connection.number)
        self._on_change()
        if not self.is_closed:
            log.info("a data connection to %s is gone: %s", self.peer, reason)
            self._retries.add(self._loop.call_later(RETRY_S, self._start))

    def _peer_ended(self, connection: _DataConnection) -> None:
        if connection.socket is not None:
            self._loop.remove_reader(connection.socket)
        connection.kill()

    def _start(self) -> None:
        if not self.is_closed:
            connection = _DataConnection(self, self._numbers())
            self._connections.add(connection)
            connection.thread.start()


def _connect(address: tuple[str, int], pacing_bytes_per_s: int) -> socket.socket:
    """A prepared TCP connection: options that count during the handshake are set before it."""
    error = OSError(f"{address[0]} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            control = prepare(connection, pacing_bytes_per_s)
            connection.connect(place)
        except OSError as failure:
            connection.close()
            error = failure
            continue
        log.debug("data connection to %s: congestion control %s", address, control)
        return connection
    raise error


def _join_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(CONNECT_TIMEOUT_S * 2)
