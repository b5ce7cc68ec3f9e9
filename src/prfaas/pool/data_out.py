"""The data connections of a link, sending end: on the I/O thread, fed from one shared queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable

from prfaas.core.blocks import BlockName
from prfaas.core.link_share import Fragment, LinkShare, OutgoingBlock
from prfaas.errors import PeerError
from prfaas.pool.io_thread import IoThread, shake_hands
from prfaas.wire.fragments import encode_prefix
from prfaas.wire.identity import peer_name
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.link import Join
from prfaas.wire.sockets import TcpInfo, fit, prepare, restart_control, share_of, tcp_info

log = logging.getLogger(__name__)

FRAGMENT_BYTES, FRAGMENT_BYTES_MIN, FRAGMENT_BYTES_LARGEST = 128 << 10, 32 << 10, 512 << 10
FRAGMENT_MS = 2
"""What a connection sends in this time is a fragment: small enough that a block crosses on all
connections at once and that an urgent one waits for little, large enough that its header and its
turn do not count."""
CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.5
STUCK_NS = 5 * 10**9
"""A connection of which nothing arrives for so long carries nothing more."""


class SendQueue:
    """A `LinkShare` between the node's loop, which fills it, and the I/O thread, which empties it.

    Args:
        on_taken: Called on the I/O thread with the bytes that go out.
        clock_ns: Monotonic clock, nanoseconds.
    """

    def __init__(self, on_taken: Callable[[int], None], clock_ns: Callable[[], int]) -> None:
        self._share = LinkShare(FRAGMENT_BYTES)
        self._lock = threading.Lock()
        self._on_taken = on_taken
        self._clock_ns = clock_ns
        self.on_more: Callable[[], object] = lambda: None
        """Called when there is something to send."""

    def add(self, block: OutgoingBlock) -> None:
        """Queue a block."""
        with self._lock:
            self._share.add(block)
        self.on_more()

    def finish(self, transfer_id: bytes) -> None:
        """Nothing more of this transfer will be added."""
        with self._lock:
            self._share.finish(transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """Forget a transfer."""
        with self._lock:
            self._share.drop(transfer_id)

    def arrived(self, transfer_id: bytes, name: BlockName) -> None:
        """The receiver has this block."""
        with self._lock:
            self._share.arrived(transfer_id, name)

    def cut(self, fragment_bytes: int) -> None:
        """From now on, cut blocks into fragments of so many bytes."""
        with self._lock:
            self._share.fragment_bytes = fragment_bytes

    def lost(self, connection: int) -> None:
        """What was in flight on this connection goes again."""
        with self._lock:
            self._share.lost(connection)
        self.on_more()

    def take(self, connection: int) -> Fragment | None:
        """What this connection sends next; None if there is nothing."""
        now_ns = self._clock_ns()
        with self._lock:
            fragment = self._share.take(connection, now_ns)
        if fragment is not None:
            self._on_taken(fragment.num_bytes)
        return fragment

    @property
    def queued_by_tenant(self) -> dict[str, int]:
        """Waiting for a connection, by the class of the tenant."""
        with self._lock:
            return self._share.queued_by_tenant

    @property
    def queued_bytes(self) -> int:
        """Waiting for a connection."""
        return self._share.queued_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Sent, and not known to have arrived."""
        with self._lock:
            return self._share.in_flight_bytes


class _DataConnection:
    """One connection. Lives on the I/O thread."""

    def __init__(self, number: int, secured: ssl.SSLSocket, queue: SendQueue, first: bytes) -> None:
        self.number = number
        self.socket = secured
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._descriptor = secured.fileno()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._parts = [memoryview(first)]
        """What is being sent, last part first."""
        self._is_idle = False
        self._sent_bytes = 0
        self._received_bytes = 0
        self._moved_at_ns = 0
        self.fitted = (0, 0)
        """Its pacing and its backlog, bytes a second and bytes."""
        self._loop.add_writer(self._descriptor, self._write)
        # The peer says nothing on a data connection: what can be read is its end.
        self._loop.add_reader(self._descriptor, self._read)

    def wake(self) -> None:
        """There may be something to send."""
        if self._is_idle and not self.ended.done():
            self._is_idle = False
            self._loop.add_writer(self._descriptor, self._write)
            self._write()

    def received(self, num_bytes: int, now_ns: int) -> None:
        """The peer has so many bytes of it; end it if it waits in vain for the others.

        A path can be dead and acknowledge: what a proxy or a peer's kernel took has not arrived.
        """
        has_moved = num_bytes != self._received_bytes or num_bytes == self._sent_bytes
        if has_moved or not self._moved_at_ns:
            self._received_bytes, self._moved_at_ns = num_bytes, now_ns
        elif now_ns - self._moved_at_ns >= STUCK_NS:
            self._fail(OSError("nothing of it arrives any more"))

    def stop(self) -> None:
        """Send nothing more."""
        self._loop.remove_writer(self._descriptor)
        self._loop.remove_reader(self._descriptor)
        self._parts = []
        if not self.ended.done():
            self.ended.cancel()

    def _write(self) -> None:
        if not self._parts and not self._next():
            return
        try:
            while self._parts:
                part = self._parts[-1]
                count = self.socket.send(part)
                if count < len(part):
                    self._parts[-1] = part[count:]
                else:
                    self._parts.pop()
        except ssl.SSLWantWriteError:
            return  # The same bytes are offered again when there is room.
        except OSError as error:
            self._fail(error)

    def _next(self) -> bool:
        fragment = self._queue.take(self.number)
        if fragment is None:
            self._is_idle = True
            self._loop.remove_writer(self._descriptor)
            return False
        self._parts = [fragment.data, memoryview(encode_prefix(fragment))]
        self._sent_bytes += sum(map(len, self._parts))
        return True

    def _read(self) -> None:
        try:
            if not self.socket.recv(1):
                self._fail(OSError("the peer closed it"))
        except ssl.SSLWantReadError:
            return
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._loop.remove_writer(self._descriptor)
        self._loop.remove_reader(self._descriptor)
        self._parts = []
        if not self.ended.done():
            # Its traceback would keep the block that was being sent.
            self.ended.set_exception(error.with_traceback(None))


class DataSenders:
    """Keeps a number of data connections to a peer open, for one session of a link.

    Args:
        address: Of the peer.
        tls: Context whose ALPN says that this is a data connection.
        peer: Name in the peer's certificate.
        pool: Our own name.
        link: Word of the session.
        queue: What they send.
        numbers: A number for every connection, none twice.
        num_connections: How many, to begin with.
        pacing_bits_per_s: What all together may send, to begin with; 0 is no limit.
        io: Where they live.
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
        pacing_bits_per_s: int,
        io: IoThread,
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._tls = tls
        self._peer = peer
        self._pool = pool
        self._link = link
        self._queue = queue
        self._numbers = numbers
        self._num_wanted = num_connections
        self._pacing_bits_per_s = pacing_bits_per_s
        self._io = io
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._slots: list[asyncio.Task[None]] = []
        self._connections: list[_DataConnection] = []
        self._is_closed = False
        self._fragment_bytes = FRAGMENT_BYTES
        queue.on_more = lambda: io.call(self._wake)
        io.call(self._fill)

    @property
    def num_open(self) -> int:
        """Connections that carry blocks."""
        return len(self._connections)

    @property
    def connections(self) -> list[int]:
        """Numbers of those that carry blocks; one that is being made will have a larger one."""
        return [connection.number for connection in list(self._connections)]

    def received(self, num_bytes: dict[int, int], now_ns: int) -> None:
        """The peer said what it has of each connection: replace those that are stuck."""
        self._io.call(self._check, num_bytes, now_ns)

    def tcp_infos(self) -> list[TcpInfo]:
        """What the kernel knows of each connection."""
        infos: list[TcpInfo] = []
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                infos.append(tcp_info(connection.socket))
        return infos

    def tune(self, num_connections: int, pacing_bits_per_s: int, bits_per_s: int) -> None:
        """Fit the connections to what is known of the path.

        Args:
            num_connections: How many there should be; none is closed that is open.
            pacing_bits_per_s: What all together may send; 0 is no limit.
            bits_per_s: What the link carries; 0 is unknown.
        """
        self._io.call(self._tune, num_connections, pacing_bits_per_s, bits_per_s)

    def restart_control(self) -> None:
        """Have congestion control look at the path anew."""
        self._io.call(self._restart_control)

    async def close(self) -> None:
        """End every connection, and give what was under way back to the queue."""
        self._queue.on_more = lambda: None
        done = asyncio.Event()
        if self._io.call(self._close, done):
            await done.wait()

    # --- on the I/O thread ---

    def _tune(self, num_connections: int, pacing_bits_per_s: int, bits_per_s: int) -> None:
        self._num_wanted = max(self._num_wanted, num_connections)
        self._pacing_bits_per_s = pacing_bits_per_s
        if bits_per_s:
            share = bits_per_s // 8 // self._num_wanted
            self._fragment_bytes = _power_of_two(share * FRAGMENT_MS // 1000)
            self._queue.cut(self._fragment_bytes)
        self._fit()
        self._fill()

    def _restart_control(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                restart_control(connection.socket)

    def _fill(self) -> None:
        while len(self._slots) < self._num_wanted and not self._is_closed:
            self._slots.append(self._io.start(self._keep_open()))

    def _close(self, done: asyncio.Event) -> None:
        self._is_closed = True
        for slot in self._slots:
            slot.cancel()
        ending = asyncio.gather(*self._slots, return_exceptions=True)
        ending.add_done_callback(lambda _: self._tell(done.set))

    def _check(self, num_bytes: dict[int, int], now_ns: int) -> None:
        for connection in self._connections:
            connection.received(num_bytes.get(connection.number, 0), now_ns)

    def _wake(self) -> None:
        for connection in self._connections:
            connection.wake()

    async def _keep_open(self) -> None:
        while True:
            try:
                await self._carry()
            except (OSError, PeerError) as error:
                log.info("a data connection to %s is gone: %s", self._peer, repr(error))
            await asyncio.sleep(RETRY_S)

    async def _carry(self) -> None:
        """Dial, and send until the connection ends."""
        with await self._dial() as secured:
            number = self._numbers()
            join = encode(Join(pool=self._pool, link=self._link, number=number))
            connection = _DataConnection(number, secured, self._queue, join)
            self._connections.append(connection)
            self._fit()
            self._tell(self._on_change)
            try:
                await connection.ended
            finally:
                connection.stop()
                self._connections.remove(connection)
                self._fit()
                self._queue.lost(number)
                self._tell(self._on_change)

    async def _dial(self) -> ssl.SSLSocket:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            plain = await connect(self._address)
            try:
                secured = self._tls.wrap_socket(plain, do_handshake_on_connect=False)
            except BaseException:
                plain.close()
                raise
            try:
                await shake_hands(secured)
                peer_name(secured, frozenset({self._peer}))
            except BaseException:
                secured.close()
                raise
        return secured

    def _fit(self) -> None:
        share = share_of(self._pacing_bits_per_s, len(self._connections))
        fitted = share, 2 * self._fragment_bytes
        for connection in self._connections:
            if connection.fitted != fitted:
                connection.fitted = fitted
                with contextlib.suppress(OSError):
                    fit(connection.socket, *fitted)

    def _tell(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what)


def _power_of_two(num_bytes: int) -> int:
    """Fragments of few sizes."""
    wanted = 1 << max(0, num_bytes - 1).bit_length()
    return max(FRAGMENT_BYTES_MIN, min(FRAGMENT_BYTES_LARGEST, wanted))


async def connect(address: tuple[str, int]) -> socket.socket:
    """A prepared TCP connection: options that count during the handshake are set before it.

    Raises:
        OSError: Nobody takes it.
    """
    loop = asyncio.get_running_loop()
    error = OSError(f"{address[0]} has no address")
    places = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in places:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            control = prepare(connection)
            await loop.sock_connect(connection, place)
        except OSError as failure:
            connection.close()
            error = failure
            continue
        except BaseException:
            connection.close()
            raise
        log.debug("data connection to %s: congestion control %s", address, control)
        return connection
    raise error
