"""One data connection of a link, sending end: on the I/O thread, fed from a shared queue."""

from __future__ import annotations

import asyncio
import ssl

from prfaas.pool.send.link_coding import LinkCoding, Scratch
from prfaas.pool.send.send_queue import SendQueue

STUCK_NS = 5 * 10**9
"""A connection without delivery for this time is closed."""


class DataConnection:
    """Sends the queue until the connection breaks. Runs on the I/O thread."""

    def __init__(
        self,
        number: int,
        secured: ssl.SSLSocket,
        queue: SendQueue,
        coding: LinkCoding,
        first: bytes,
    ) -> None:
        self.number = number
        self._coding = coding
        self._scratch = Scratch()
        self.socket = secured
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._descriptor = secured.fileno()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._parts = [memoryview(first)]
        """Parts that are being sent, the last one first."""
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
        """The peer has this number of bytes of it; end it if it waits in vain for the others.

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
            return  # The same bytes are offered again when the socket is writable.
        except OSError as error:
            self._fail(error)

    def _next(self) -> bool:
        fragment = self._queue.take(self.number)
        if fragment is None:
            self._is_idle = True
            self._loop.remove_writer(self._descriptor)
            return False
        self._parts = self._coding.parts(fragment, self._scratch)[::-1]
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
