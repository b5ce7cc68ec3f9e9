"""Reading of fragments from one data connection, straight into the blocks. On its lane."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import Protocol

from prfaas.errors import PeerError, without_frames
from prfaas.pool.receive.block_assembly import Assembly, NoRoomError, is_same_fragment
from prfaas.pool.receive.decoding import Decoding
from prfaas.wire.fragments import (
    FRAGMENT_BYTES_MAX,
    FragmentPrefix,
    FragmentStream,
    ReceivedBlock,
)
from prfaas.wire.sealed.records import Opener
from prfaas.wire.sealed.streams import ClearStream, SealedStream

WAKE_BYTES, RECORD_BYTES = 64 << 10, 18 << 10
"""Bytes for which a reader of a TLS connection wakes up; a TLS record may be partly read."""
SEALED_WAKE_BYTES = 1 << 20
"""The same without TLS: nothing can be done before a fragment is whole."""


class Stream(Protocol):
    """Bytes of a connection on their way to become fragments."""

    @property
    def view(self) -> memoryview:
        """Buffer for the next bytes; never empty."""

    @property
    def missing_bytes(self) -> int:
        """Bytes without which nothing can be done."""

    def filled(self, num_bytes: int) -> FragmentPrefix | None:
        """Record bytes in `view`; return the fragment that they complete."""

    def divert(self, nowhere: memoryview) -> None:
        """Write the rest of the fragment that is being read elsewhere."""

    def ended(self) -> None:
        """The connection has ended."""

    def let_go(self) -> None:
        """Keep no memory of a block."""


class FragmentOwner(Protocol):
    """The connection's owner."""

    peer: str
    link: str
    num_bytes: int

    @property
    def decoding(self) -> Decoding:
        """Decoder of coded fragments."""

    def takes(self, prefix: FragmentPrefix) -> bool:
        """Return True if a fragment is wanted."""

    def no_room(self, prefix: FragmentPrefix) -> None:
        """A fragment is dropped as there is no memory for its block."""

    def deliver(self, block: ReceivedBlock, reader: FragmentReader) -> bool:
        """Hand a block on; False if the next one has to wait for `go_on`."""


class FragmentReader:
    """Reads fragments into their blocks, or into nowhere.

    A coded fragment is read beside its block and decoded when it is whole: only then it has a place
    in the block, so that it never waits for the network with a place that others could fill. So is
    a sealed one.

    Args:
        receiver: Owner of the connection.
        connection: Authenticated socket that does not block, TLS or plain.
        assembly: Unfinished blocks of its link.
        opener: Opens what was sealed; None with TLS.
        turn_bytes: Bytes that it reads before other connections are served.
    """

    def __init__(
        self,
        receiver: FragmentOwner,
        connection: socket.socket,
        assembly: Assembly,
        opener: Opener | None,
        turn_bytes: int,
    ) -> None:
        self._turn_bytes = turn_bytes
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._receiver = receiver
        self._connection = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._number = connection.fileno()
        self._assembly = assembly
        self._nowhere = memoryview(bytearray(FRAGMENT_BYTES_MAX))
        self._stream: Stream
        if opener is None:
            self._stream = FragmentStream(self._begin)
        else:
            kind = SealedStream if opener.is_encrypted else ClearStream
            self._stream = kind(opener, self._begin)
        self._claimed: FragmentPrefix | None = None
        """The fragment that has its place in a block, and is not whole."""
        self._is_paused = False
        self._wakes_at = 1
        self._loop.add_reader(self._number, self._read)
        self._loop.call_soon(self._read)  # Data received with the join is not announced again.

    def stop(self) -> None:
        """Read nothing more."""
        self._loop.remove_reader(self._number)
        if self._claimed is not None:
            self._assembly.release(self._claimed, self)
        self._stream.let_go()
        if not self.ended.done():
            self.ended.cancel()

    def fail(self, error: Exception) -> None:
        """End the connection."""
        if not self.ended.done():
            self.ended.set_exception(without_frames(error))

    def disown(self, prefix: FragmentPrefix) -> bool:
        """Another connection brings the fragment that is being read. Any thread may call it."""
        if threading.get_ident() != self._thread:
            with contextlib.suppress(RuntimeError):  # The lane has ended, and with it the claim.
                self._loop.call_soon_threadsafe(self._give_way, prefix)
            return False
        self._divert()
        return True

    def _give_way(self, prefix: FragmentPrefix) -> None:
        """Let a connection on another lane write a fragment, if this one has not completed it."""
        claimed = self._claimed
        if claimed is not None and is_same_fragment(claimed, prefix):
            self._divert()
            self._assembly.release(prefix, self)

    def _divert(self) -> None:
        self._stream.divert(self._nowhere)
        self._claimed = None

    def go_on(self, block: ReceivedBlock) -> None:
        """A block is dealt with: free are further ones."""
        self._assembly.has_arrived(block)
        if self._is_paused and not self.ended.done():
            self._is_paused = False
            self._loop.add_reader(self._number, self._read)
            self._read()

    def _read(self) -> None:
        left = self._turn_bytes
        try:
            while left > 0 and not self._is_paused and not self.ended.done():
                view = self._stream.view
                count = self._connection.recv_into(view)
                is_empty = count < len(view) and not self._is_tls
                del view  # It would keep the block of the last fragment.
                if not count:
                    self._stream.ended()
                    self.ended.set_result(None)
                    return
                left -= count
                self._receiver.num_bytes += count
                fragment = self._stream.filled(count)
                if fragment is not None:
                    self._finish(fragment)
                if is_empty:
                    self._sleep()
                    return
            if not self._is_paused and not self.ended.done():
                # The rest may be below the wake-up threshold of the socket, and is then not
                # announced.
                self._loop.call_soon(self._read)
        except (ssl.SSLWantReadError, BlockingIOError):
            self._sleep()
        except (OSError, PeerError) as error:
            self.fail(error)

    def _sleep(self) -> None:
        """Wake up for a large part of the missing bytes, not for every segment."""
        missing = self._stream.missing_bytes
        if self._is_tls:
            wanted = min(max(1, missing - RECORD_BYTES), WAKE_BYTES)
        else:
            wanted = min(max(1, missing), SEALED_WAKE_BYTES)
        if wanted != self._wakes_at:
            self._wakes_at = wanted
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _begin(self, prefix: FragmentPrefix) -> memoryview:
        if prefix.codec:
            self._receiver.decoding.check(self._receiver.peer, self._receiver.link, prefix)
        if prefix.coded_bytes:
            return self._nowhere[: prefix.payload_bytes]
        place = self._claim(prefix)
        return self._nowhere[: prefix.num_bytes] if place is None else place

    def _claim(self, prefix: FragmentPrefix) -> memoryview | None:
        place = None
        if self._receiver.takes(prefix):
            try:
                place = self._assembly.claim(prefix, self, lambda: self._receiver.takes(prefix))
            except NoRoomError:
                self._receiver.no_room(prefix)
        self._claimed = prefix if place is not None else None
        return place

    def _decode(self, prefix: FragmentPrefix) -> None:
        place = self._claim(prefix)
        if place is not None:
            self._receiver.decoding.decode(self._nowhere[: prefix.payload_bytes], place)

    def _finish(self, prefix: FragmentPrefix) -> None:
        self._receiver.decoding.came(self._receiver.peer, prefix)
        if prefix.coded_bytes:
            self._decode(prefix)
        if self._claimed is None:
            return
        self._claimed = None
        block = self._assembly.written(prefix, self)
        if block is not None and not self._receiver.deliver(block, self):
            self._is_paused = True
            self._loop.remove_reader(self._number)
