"""Assembly of fragments into blocks, in their final memory.

Reading of fragments from one data connection, straight into the blocks. On its lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prfaas.core.invariants import check_invariants
from prfaas.core.kv.blocks import BlockKey
from prfaas.errors import PeerError, without_frames
from prfaas.pool.receive.decoding import Decoding
from prfaas.wire.fragments import (
    FRAGMENT_BYTES_MAX,
    FragmentPrefix,
    FragmentStream,
    ReceivedBlock,
)
from prfaas.wire.sealed.records import Opener
from prfaas.wire.sealed.streams import ClearStream, SealedStream

BlockBuffer = bytearray | memoryview
Name = tuple[bytes, bytes, BlockKey, bytes, bool, int, int]
"""Transfer, layout, key, digest, whether inherited, size of its stream, and size: fragments that
agree in all belong to one block."""


TAKEN_S_MAX = 1.0
"""Longest wait for the lane that writes a fragment: it completes it, or gives way, in its next
turn."""
ROOM_S_MAX, ROOM_ASKED_S = 0.1, 0.005
"""Longest wait for memory, and time between two requests for it. Memory that is full of blocks
without a lease is freed by the node's loop, which can be slower than a link for so long."""


class NoRoomError(Exception):
    """There is no memory for a block."""


class Writer(Protocol):
    """Writer of a fragment into its block."""

    def disown(self, prefix: FragmentPrefix) -> bool:
        """Write elsewhere from now on: another connection brings the same fragment.

        Returns:
            False if another thread writes it. That gives way in its next turn.
        """


@dataclass(eq=False, slots=True)
class _Unfinished:
    """A block of which some fragments are here, or coming."""

    data: memoryview
    missing_bytes: int
    writers: dict[int, Writer | None] = field(default_factory=dict)
    """Current writer of the fragment at an offset; None once it is complete."""


class Assembly:
    """Puts the fragments of a peer's blocks together. Any thread may call it.

    Fragments are written straight into the block, by connections on several lanes at once. A
    fragment has one writer at a time, and a block is complete only when nobody writes to it any
    more: nothing changes it after its digest was compared. The stream of a rounded block, which is
    shorter, is put together at its start.

    Args:
        allocate: Memory for a block of this number of bytes, its content does not matter; None if
            there is no room.
        bytes_max: Of unfinished blocks; a single one may be larger.
    """

    def __init__(
        self, allocate: Callable[[int], BlockBuffer | None], bytes_max: int, blocks_max: int
    ) -> None:
        self._blocks_max = blocks_max
        self._allocate = allocate
        self._bytes_max = bytes_max
        self._unfinished: dict[Name, _Unfinished] = {}
        self._bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        """Lock of all above; notified when a writer is gone."""

    @property
    def unfinished_bytes(self) -> int:
        """Memory of unfinished blocks. Any thread may call it."""
        return self._bytes

    def claim(
        self, prefix: FragmentPrefix, writer: Writer, is_wanted: Callable[[], bool]
    ) -> memoryview | None:
        """Destination of a fragment.

        Args:
            is_wanted: Tells if its transfer is open. Asked once a new block can be seen by
                `forget`, which is called after a transfer ended: one of both finds the block.

        Returns:
            None if it is here already, if another connection writes it and its lane does not turn,
            or if its transfer or the link is over.

        Raises:
            NoRoomError: This would be one block more than there is memory for after a wait, or than
                a peer may leave unfinished.
        """
        name, began = _name(prefix), time.monotonic()
        until = began + TAKEN_S_MAX
        with self._changed:
            while not self._is_closed:
                block = self._unfinished.get(name) or self._start(name)
                if block is None:
                    if time.monotonic() - began > ROOM_S_MAX:
                        raise NoRoomError
                    self._changed.wait(ROOM_ASKED_S)
                    if not is_wanted():
                        return None
                    continue
                if not block.writers and not is_wanted():
                    self._drop(name)
                    return None
                if prefix.offset in block.writers:
                    earlier = block.writers[prefix.offset]
                    if earlier is None:
                        return None
                    if not earlier.disown(prefix):
                        if not self._changed.wait(until - time.monotonic()):
                            return None
                        continue
                block.writers[prefix.offset] = writer
                return block.data[prefix.offset : prefix.offset + prefix.num_bytes]
        return None

    def written(self, prefix: FragmentPrefix, writer: Writer) -> ReceivedBlock | None:
        """A fragment that a writer claimed is there.

        Returns:
            The block, if this was the last that was missing.

        Raises:
            PeerError: Fragments overlap.
        """
        name = _name(prefix)
        with self._changed:
            self._changed.notify_all()
            block = self._unfinished.get(name)
            if block is None or block.writers.get(prefix.offset) is not writer:
                return None  # Its transfer has ended, or it has arrived, and began anew meanwhile.
            block.writers[prefix.offset] = None
            block.missing_bytes -= prefix.num_bytes
            if block.missing_bytes > 0:
                return None
            if block.missing_bytes < 0 or any(block.writers.values()):
                raise PeerError(f"fragments of block {prefix.key.block_hash.hex()[:12]} overlap")
            self._drop(name)
        return ReceivedBlock(
            prefix.transfer_id,
            prefix.layout_id,
            prefix.key,
            prefix.digest,
            block.data,
            prefix.is_inherited,
            prefix.stream_bytes,
            age=prefix.age,
        )

    def release(self, prefix: FragmentPrefix, writer: Writer) -> None:
        """A writer is gone before its fragment was there."""
        with self._changed:
            self._changed.notify_all()
            block = self._unfinished.get(_name(prefix))
            if block is not None and block.writers.get(prefix.offset) is writer:
                del block.writers[prefix.offset]

    def close(self) -> None:
        """The link is over: drop all, and take nothing more."""
        with self._changed:
            self._changed.notify_all()
            self._is_closed = True
            self._unfinished.clear()
            self._bytes = 0

    def has_arrived(self, block: ReceivedBlock) -> None:
        """Drop unfinished copies of a complete block.

        A fragment of it may have come again, of a connection that was lost just then.
        """
        named = block.transfer_id, block.layout_id, block.key, block.digest
        name = *named, block.is_inherited, block.stream_bytes, len(block.data)
        with self._changed:
            if name in self._unfinished:
                self._drop(name)

    def forget(self, transfer_id: bytes) -> None:
        """Drop unfinished blocks of a transfer."""
        with self._changed:
            for name in [name for name in self._unfinished if name[0] == transfer_id]:
                self._drop(name)

    def validate(self) -> None:
        """Check what has to hold at any time; AssertionError if it does not."""
        with self._changed:
            sizes = [name[-1] for name in self._unfinished]
            check_invariants(
                [
                    ("unfinished bytes are counted", self._bytes == sum(sizes)),
                    ("unfinished blocks are few", len(sizes) <= self._blocks_max),
                    ("a link that is over has no blocks", not (self._is_closed and sizes)),
                ]
            )

    def _start(self, name: Name) -> _Unfinished | None:
        """A new block; None if there is no memory for it at present."""
        size = name[-1]
        is_full = self._unfinished and self._bytes + size > self._bytes_max
        if is_full or len(self._unfinished) >= self._blocks_max:
            raise NoRoomError
        buffer = self._allocate(size)
        if buffer is None:
            return None
        block = _Unfinished(memoryview(buffer), name[-2] or size)
        self._unfinished[name] = block
        self._bytes += size
        return block

    def _drop(self, name: Name) -> None:
        del self._unfinished[name]
        self._bytes -= name[-1]


def is_same_fragment(one: FragmentPrefix, other: FragmentPrefix) -> bool:
    """Return True if two fragments have one place in one block."""
    return one.offset == other.offset and _name(one) == _name(other)


def _name(prefix: FragmentPrefix) -> Name:
    named = prefix.transfer_id, prefix.layout_id, prefix.key, prefix.digest
    return *named, prefix.is_inherited, prefix.stream_bytes, prefix.block_bytes


WAKE_BYTES, RECORD_BYTES = 1 << 20, 18 << 10
"""Bytes for which a reader wakes up, so that it does rarely; a TLS record may be partly read."""


def _records_into(connection: ssl.SSLSocket) -> Callable[[memoryview], int]:
    """Return `recv_into` that reads all TLS records that have arrived, and not one a call."""

    def fill(view: memoryview) -> int:
        count = 0
        try:
            while count < len(view) and (part := connection.recv_into(view[count:])):
                count += part
        except ssl.SSLWantReadError:
            if not count:
                raise
        return count

    return fill


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
        self._fill: Callable[[memoryview], int] = (
            _records_into(connection)
            if isinstance(connection, ssl.SSLSocket)
            else connection.recv_into
        )
        self._number = connection.fileno()
        self._assembly = assembly
        self._nowhere = memoryview(bytearray(FRAGMENT_BYTES_MAX))
        self._stream: FragmentStream | SealedStream | ClearStream
        if opener is None:
            self._stream = FragmentStream(self._begin)
        else:
            kind = SealedStream if opener.is_encrypted else ClearStream
            self._stream = kind(opener, self._begin)
        self._claimed: FragmentPrefix | None = None
        """The fragment that has its place in a block, and is not whole."""
        self._is_paused = False
        self.has_slept = False
        """True if it has waited for bytes since this was set: its lane has time."""
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

    def has_arrived(self, block: ReceivedBlock) -> bool:
        """A block is dealt with; return True if `go_on` has to follow. Any thread may call it."""
        self._assembly.has_arrived(block)
        return self._is_paused

    def go_on(self) -> None:
        """Read further blocks."""
        if self._is_paused and not self.ended.done():
            self._is_paused = False
            self._loop.add_reader(self._number, self._read)
            self._read()

    def _read(self) -> None:
        left = self._turn_bytes
        try:
            while left > 0 and not self._is_paused and not self.ended.done():
                view = self._stream.view
                count = self._fill(view)
                is_empty = count < len(view)
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
        self.has_slept = True
        missing = self._stream.missing_bytes - (RECORD_BYTES if self._is_tls else 0)
        wanted = min(max(1, missing), WAKE_BYTES)
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
        if block is None:
            return
        self._is_paused = True  # Before it is counted: one that is dealt with then finds it so.
        if self._receiver.deliver(block, self):
            self._is_paused = False
        else:
            self._loop.remove_reader(self._number)
