"""One data connection of a link, sending end: on one lane, fed from a shared queue."""

from __future__ import annotations

import asyncio
import socket
import ssl

from prfaas.errors import without_frames
from prfaas.pool.net.io_thread import Lane
from prfaas.pool.send.link_coding import LinkCoding, Scratch
from prfaas.pool.send.send_queue import SendQueue
from prfaas.wire.sealed.records import Sealer
from prfaas.wire.sealed.streams import SealedParts


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
