"""Assembly of fragments into blocks, in their final memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prfaas.core.kv.blocks import BlockKey
from prfaas.errors import PeerError, check_invariants
from prfaas.wire.fragments import FragmentPrefix, ReceivedBlock

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
        """Check what has to hold at any time.

        Raises:
            AssertionError: It does not.
        """
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
