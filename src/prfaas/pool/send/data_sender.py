"""The data connections of a link, sending end: on lanes, fed from one shared queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.transfer.link_scheduler import Fragment, LinkShare, OutgoingBlock
from prfaas.errors import PeerError, without_frames
from prfaas.logs import log_event
from prfaas.pool.net.io_thread import Lane
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.net.tls_sockets import connect, shake_hands
from prfaas.pool.send.fragment_sizes import fragment_sizes
from prfaas.pool.send.link_coding import LinkCoding, Scratch
from prfaas.tasks import Backoff
from prfaas.wire.fragments import FRAGMENT_BYTES_MAX
from prfaas.wire.identity import peer_name
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.link import Join
from prfaas.wire.sealed.keys import LinkSecret
from prfaas.wire.sealed.records import Sealer
from prfaas.wire.sealed.streams import SealedParts
from prfaas.wire.sockets import TcpInfo, fit, restart_control, share_of, tcp_info

log = logging.getLogger(__name__)


FRAGMENT_BYTES = 128 << 10
"""Until something is known of the path."""


class SendQueue:
    """A `LinkShare` between the node's loop, which fills it, and the lanes, which empty it.

    `with queue as share:` holds its lock.
    """

    def __init__(self) -> None:
        self._share = LinkShare(FRAGMENT_BYTES)
        self._lock = threading.Lock()
        self.on_more: Callable[[], object] = lambda: None
        """Called when there is something to send."""

    def __enter__(self) -> LinkShare:
        self._lock.acquire()
        return self._share

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def add(self, block: OutgoingBlock) -> None:
        """Queue a block."""
        with self._lock:
            self._share.add(block)
        self.on_more()

    def lost(self, connection: int) -> None:
        """Send unacknowledged fragments of this connection again."""
        with self._lock:
            self._share.lost(connection)
        self.on_more()

    def take(self, connection: int) -> Fragment | None:
        """Return the next fragment of this connection; None if the queue is empty."""
        now_ns = time.monotonic_ns()
        with self._lock:
            return self._share.take(connection, now_ns)


PAGE_BYTES = 4096
CONNECT_TIMEOUT_S = 5.0
STABLE_S = 5.0
"""A connection that lasted so long was no refusal: the next attempt follows soon."""
UNPROVED_MAX, PROVED_BYTES, PROVED_S = 3, 1 << 20, 60.0
"""Connections without TLS that one place has in a row, none of which lasts so long, while none of
all delivers so many bytes: something on the path may let nothing but TLS through, and TLS is used
from then on. The first bytes prove nothing: what looks into them may let some pass before."""


class DataConnection:
    """Sends the queue until the connection breaks. Runs on its lane.

    Args:
        number: Its number; none twice.
        connection: Connected socket that does not block; TLS without `sealer`, else plain.
        coding: How fragments are coded.
        join: First bytes with TLS.
        sealer: Seals all that is sent; None with TLS.
        stuck_ns: It is closed if nothing is delivered for this time.
    """

    def __init__(
        self,
        number: int,
        connection: socket.socket,
        queue: SendQueue,
        coding: LinkCoding,
        join: bytes,
        sealer: Sealer | None = None,
        *,
        lane: Lane,
        stuck_ns: int,
    ) -> None:
        self.number = number
        self._lane = lane
        self._stuck_ns = stuck_ns
        self._coding = coding
        self._scratch = Scratch()
        self.socket = connection
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._descriptor = connection.fileno()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._sealed = SealedParts(sealer) if sealer is not None else None
        self._parts = [memoryview(join if sealer is None else sealer.opening)]
        """Parts that are being sent, in order."""
        self._is_idle = False
        """True while it waits for something to send, and nobody has roused it."""
        self._sent_bytes = 0 if sealer is None else len(sealer.opening)
        self._received_bytes = 0
        self._moved_at_ns = 0
        self.fitted = (0, 0)
        """Its pacing and its backlog, bytes a second and bytes."""
        self._loop.add_writer(self._descriptor, self._write)
        # The peer says nothing on a data connection: what can be read is its end.
        self._loop.add_reader(self._descriptor, self._read)

    def rouse(self) -> None:
        """There may be something to send. Any thread may call it."""
        if self._is_idle:
            self._is_idle = False
            self._lane.call(self._wake)

    def received_later(self, num_bytes: int, now_ns: int) -> None:
        """Have `received` called on its lane."""
        self._lane.call(self.received, num_bytes, now_ns)

    def _wake(self) -> None:
        if not self.ended.done():
            self._loop.add_writer(self._descriptor, self._write)
            self._write()

    def received(self, num_bytes: int, now_ns: int) -> None:
        """The peer has this number of bytes of it; end it if it waits in vain for the others.

        A path can be dead and acknowledge: bytes at a proxy or in the peer's kernel are not here.
        """
        if self.ended.done():
            return  # Its descriptor may be another connection's.
        has_moved = num_bytes != self._received_bytes or num_bytes == self._sent_bytes
        if has_moved or not self._moved_at_ns:
            self._received_bytes, self._moved_at_ns = num_bytes, now_ns
        elif now_ns - self._moved_at_ns >= self._stuck_ns:
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
            if self._sealed is not None:
                self._advance(self.socket.sendmsg(self._parts))
                return  # A rest means that the socket is full.
            while self._parts:
                self._advance(self.socket.send(self._parts[0]))
        except (ssl.SSLWantWriteError, BlockingIOError):
            return  # The same bytes are offered again when the socket is writable.
        except OSError as error:
            self._fail(error)

    def _advance(self, num_bytes: int) -> None:
        """Drop the bytes that the socket has accepted."""
        while self._parts and num_bytes >= len(self._parts[0]):
            num_bytes -= len(self._parts.pop(0))
        if num_bytes:
            self._parts[0] = self._parts[0][num_bytes:]

    def _next(self) -> bool:
        self._is_idle = True  # Before it looks: what is added after that finds it idle.
        fragment = self._queue.take(self.number)
        if fragment is None:
            self._loop.remove_writer(self._descriptor)
            return False
        self._is_idle = False
        self._parts = self._coding.parts(fragment, self._scratch)
        if self._sealed is not None:
            self._parts = self._sealed.parts(*self._parts)
        self._sent_bytes += sum(map(len, self._parts))
        return True

    def _read(self) -> None:
        try:
            is_end = not self.socket.recv(1)
            if is_end:
                self._fail(OSError("the peer closed it"))
            elif self._sealed is not None:
                self._fail(OSError("it was answered, which no peer does"))
        except (ssl.SSLWantReadError, BlockingIOError):
            return
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._loop.remove_writer(self._descriptor)
        self._loop.remove_reader(self._descriptor)
        self._parts = []
        if not self.ended.done():
            self.ended.set_exception(without_frames(error))


class _Slot:
    """Place of one connection, on the lane where it lives."""

    def __init__(self, lane: Lane, senders: DataSenders) -> None:
        self._lane = lane
        self._task: asyncio.Task[None] | None = None
        self._ended = Future[None]()
        self.is_stopping = False
        lane.call(self._start, senders)

    @property
    def has_ended(self) -> bool:
        """Return True if its work is over."""
        return self._ended.done()

    def stop(self) -> Future[None]:
        """Cancel its work; the result is there when that has ended."""
        self.is_stopping = True
        if not self._lane.call(self._stop):
            self._end()
        return self._ended

    def _start(self, senders: DataSenders) -> None:
        self._task = self._lane.start(senders.keep_open(self._lane))
        self._task.add_done_callback(self._end)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, _: object = None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class SendersOwner(Protocol):
    """Follows the data connections of a link."""

    def update(self) -> None:
        """A connection has opened or closed. Called on the node's loop."""


@dataclass(frozen=True, slots=True)
class LinkSession:
    """Agreement of both ends on one connection for messages, until it ends."""

    link: str
    """Word by which data connections with TLS identify themselves."""
    secret: LinkSecret | None
    """Of the session, if its data connections have no TLS."""
    num_max: int
    """The most of them that the peer takes, to begin with; 0 is no limit."""
    is_proved: bool
    """True if the path is known to let connections without TLS through."""


class DataSenders:
    """Keeps a number of data connections to a peer open, for one session of a link.

    Args:
        tls: Context with the ALPN of data connections.
        numbers: A number for every connection, none twice.
        owner: Told to when a connection opens or closes.
    """

    def __init__(
        self,
        end: LinkEnd,
        to: Destination,
        session: LinkSession,
        tls: ssl.SSLContext,
        queue: SendQueue,
        coding: LinkCoding,
        numbers: Iterator[int],
        owner: SendersOwner,
    ) -> None:
        self._end, self._to, self._tls, self._owner = end, to, tls, owner
        self._io, self._limits = end.io, end.send
        self._link, self._num_max = session.link, session.num_max
        self.secret = session.secret
        """Secret of the session; None if its connections have TLS."""
        self.is_proved = session.is_proved
        """True once one without TLS has delivered PROVED_BYTES: those that end do it for other
        reasons, as on a host that is short of CPU."""
        self._queue, self._coding, self._numbers = queue, coding, numbers
        self._num_wanted = self._pacing_bits_per_s = 0
        self._loop = asyncio.get_running_loop()
        self._slots: list[_Slot] = []
        self._connections: list[DataConnection] = []
        self._is_closed = False
        self._backlog_bytes = 2 * FRAGMENT_BYTES
        self._num_renewed = 0
        queue.on_more = self._more

    @property
    def num_open(self) -> int:
        """Connections that carry blocks."""
        return len(self._connections)

    @property
    def connections(self) -> list[int]:
        """Numbers of those that carry blocks; one that is being made will have a larger one."""
        return [connection.number for connection in list(self._connections)]

    def _more(self) -> None:
        """There is something to send. Connections that send take it by themselves."""
        for connection in list(self._connections):
            connection.rouse()

    def received(self, num_bytes: dict[int, int], now_ns: int) -> None:
        """Compare the peer's report with each connection, and replace stuck ones."""
        self._io.call(self._check, num_bytes, now_ns)

    def tcp_infos(self) -> list[TcpInfo]:
        """State of each connection, from the kernel."""
        infos: list[TcpInfo] = []
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                infos.append(tcp_info(connection.socket))
        return infos

    def tune(
        self, num_connections: int, pacing_bits_per_s: int, bits_per_s: int, rtt_ns: int
    ) -> None:
        """Adapt the connections to the path. The first call opens them.

        Args:
            num_connections: How many there should be; none is closed that is open.
            pacing_bits_per_s: What all together may send; 0 is no limit.
            bits_per_s: What the path takes of the link, for the size of fragments; 0 is unknown.
            rtt_ns: Round trip of the path.
        """
        self._io.call(self._tune, num_connections, pacing_bits_per_s, bits_per_s, rtt_ns)

    def allow(self, num_max: int) -> None:
        """Have no more connections than that from now on; the newest are closed."""
        self._io.call(self._allow, num_max)

    def restart_control(self, *, is_one: bool = False) -> None:
        """Restart congestion control of all connections, or of one: of each in turn."""
        self._io.call(self._restart_control, is_one)

    async def close(self) -> None:
        """End every connection, and return unacknowledged fragments to the queue."""
        self._queue.on_more = lambda: None
        done = asyncio.Event()
        if self._io.call(self._close, done):
            await done.wait()

    # --- on the first lane ---

    def _tune(
        self, num_connections: int, pacing_bits_per_s: int, bits_per_s: int, rtt_ns: int
    ) -> None:
        self._num_wanted = max(self._num_wanted, num_connections)
        self._pacing_bits_per_s = pacing_bits_per_s
        if bits_per_s:
            share = bits_per_s // 8 // min(self._num_wanted, self._num_max or self._num_wanted)
            sizes = fragment_sizes(share, rtt_ns, self._limits.fragment_bytes_min)
            self._backlog_bytes, expansion = sizes.backlog, self._coding.expansion
            with self._queue as queue:
                queue.fragment_bytes = _expanded(sizes.largest, expansion)
                queue.first_fragment_bytes = _expanded(sizes.first, expansion)
        self._fit()
        self._fill()

    def _restart_control(self, is_one: bool) -> None:
        connections = list(self._connections)
        if is_one and connections:
            self._num_renewed += 1
            connections = [connections[self._num_renewed % len(connections)]]
        for connection in connections:
            with contextlib.suppress(OSError):
                restart_control(connection.socket)

    def _allow(self, num_max: int) -> None:
        self._num_max = num_max
        self._fill()

    def _fill(self) -> None:
        """Have as many slots as are wanted and allowed. What a closed one has not sent, or is not
        known to have arrived, goes over the others."""
        if self._is_closed:
            return
        self._slots = [slot for slot in self._slots if not slot.has_ended]
        num_slots = sum(not slot.is_stopping for slot in self._slots)
        num_wanted = min(self._num_wanted, self._num_max or self._num_wanted)
        for _ in range(num_wanted - num_slots):
            lane = self._io if self.secret is None else self._io.take_lane()
            self._slots.append(_Slot(lane, self))
        if num_slots > num_wanted:
            running = [slot for slot in self._slots if not slot.is_stopping]
            for slot in running[num_wanted:]:
                slot.stop()

    def _move(self) -> None:
        """Continue on the first lane, where connections with TLS are."""
        if not self._is_closed:
            self._slots.append(_Slot(self._io, self))

    def _close(self, done: asyncio.Event) -> None:
        self._is_closed = True
        ends = [asyncio.wrap_future(slot.stop()) for slot in self._slots]
        ending = asyncio.gather(*ends, return_exceptions=True)
        ending.add_done_callback(lambda _: self._tell(done.set))

    def _check(self, num_bytes: dict[int, int], now_ns: int) -> None:
        for connection in list(self._connections):
            arrived = num_bytes.get(connection.number, 0)
            self.is_proved |= self.secret is not None and arrived >= PROVED_BYTES
            connection.received_later(arrived, now_ns)

    # --- on the lane of a connection ---

    async def keep_open(self, lane: Lane) -> None:
        """Keep one connection on a lane open until cancelled."""
        backoff = Backoff(self._limits.redial_s, self._limits.redial_max_s)
        loop, num_unproved = asyncio.get_running_loop(), 0
        while (secret := self.secret) is not None or lane is self._io:
            began, connection = loop.time(), None
            try:
                with await self._dial(secret) as dialled:
                    connection = self._connect(dialled, secret, lane)
                    await self._carry(connection)
            except (OSError, PeerError) as error:
                log.info("a data connection to %s is gone: %s", self._to.peer, repr(error))
            if connection is not None:
                is_good = self.is_proved or loop.time() - began > PROVED_S
                num_unproved = 0 if is_good else num_unproved + 1
            if num_unproved >= UNPROVED_MAX and self.secret is not None:
                self.secret = None
                log_event(log, logging.WARNING, "link_uses_tls", peer=self._to.peer)
            if loop.time() - began > STABLE_S:
                backoff.reset()
            await backoff.pause()
        self._io.call(self._move)

    def _connect(
        self, dialled: socket.socket, secret: LinkSecret | None, lane: Lane
    ) -> DataConnection:
        number = next(self._numbers)
        return DataConnection(
            number,
            dialled,
            self._queue,
            self._coding,
            encode(Join(pool=self._end.pool, link=self._link, number=number)),
            Sealer(secret, number) if secret is not None else None,
            lane=lane,
            stuck_ns=self._limits.stuck_ns,
        )

    async def _carry(self, connection: DataConnection) -> None:
        """Send until the connection ends."""
        self._connections.append(connection)
        self._fit()
        self._tell(self._owner.update)
        try:
            await connection.ended
        finally:
            connection.stop()
            self._connections.remove(connection)
            self._fit()
            self._queue.lost(connection.number)
            self._tell(self._owner.update)

    async def _dial(self, secret: LinkSecret | None) -> socket.socket:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            plain = await connect(self._to.address)
            if secret is not None:
                return plain
            try:
                secured = self._tls.wrap_socket(plain, do_handshake_on_connect=False)
            except BaseException:
                plain.close()
                raise
            try:
                await shake_hands(secured)
                peer_name(secured, self._to.expected)
            except BaseException:
                secured.close()
                raise
        return secured

    def _fit(self) -> None:
        connections = list(self._connections)
        share = share_of(self._pacing_bits_per_s, len(connections))
        fitted = share, self._backlog_bytes
        for connection in connections:
            if connection.fitted != fitted:
                connection.fitted = fitted
                with contextlib.suppress(OSError):
                    fit(connection.socket, *fitted)

    def _tell(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what)


def _expanded(num_bytes: int, expansion: float) -> int:
    """Bytes of a block whose code has as many bytes, in whole pages."""
    return min(FRAGMENT_BYTES_MAX, round(num_bytes * expansion)) // PAGE_BYTES * PAGE_BYTES
