"""An engine's shared memory: rows, and the place of blocks in them.

A row holds the pages of all ranks of an engine, a block the bytes of the model. Blocks are
converted in the one copy that is made anyway: the kernel scatters the bytes of a row over a block,
and gathers them from there.

The file is read and written, never mapped: an engine that makes its file shorter, or dies while it
makes it, would otherwise end whoever touches the pages that are gone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

from prfaas.core.kv.blocks import BlockKey, CacheGroup, Layout
from prfaas.core.kv.canonical.copies import CopyRun
from prfaas.core.kv.canonical.pieces import FRAGMENTS_MAX, Piece, Pieces, pieces
from prfaas.errors import PeerError
from prfaas.wire.messages.engine import EngineHello

Move = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""
PLACES_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Buffers of one system call."""


class EngineMemory:
    """Copies blocks out of rows and into rows. Any thread may ask.

    Args:
        descriptor: Of the shared file; taken over and closed.
        hello: The engine's description of it.

    Raises:
        PeerError: The description contradicts itself or the file.
    """

    def __init__(self, descriptor: int, hello: EngineHello) -> None:
        self.layout: Layout = hello.layout.layout()
        self._descriptor = descriptor
        self._row_bytes = hello.row_bytes
        self._num_rows = hello.num_rows
        self._lock = threading.Lock()
        self._is_closed = False
        span = hello.row_span or hello.row_bytes
        held = [group for group in self.layout.groups if group.index not in hello.elsewhere]
        self._sizes = {group.index: group.block_bytes for group in held}
        try:
            self._check(hello, os.fstat(descriptor).st_size)
            self._pieces = {
                group.index: pieces(_runs(hello, group), group.block_bytes, span) for group in held
            }
        except (OSError, PeerError, ValueError) as error:
            self.close()
            raise PeerError(f"shared memory cannot be used: {error}") from None

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of `group`; PeerError if there is no such group."""
        if group not in self._sizes:
            raise PeerError(f"cache group {group}; the engine announced {sorted(self._sizes)}")
        return self._sizes[group]

    def pieces(self, group: int) -> Pieces:
        """Return the copies between a row and a block of a group that was announced."""
        return self._pieces[group]

    def check(self, key: BlockKey, row: int) -> None:
        """Return True if there is such a group and such a row; PeerError if there is not."""
        self.block_bytes(key.group)
        if not 0 <= row < self._num_rows:
            raise PeerError(f"row {row}; the engine announced {self._num_rows}")

    def read(self, key: BlockKey, row: int, into: memoryview) -> None:
        """Copy a block out of a row that was checked, into a buffer of its size; PeerError if the
        file ends before the row does, or is closed."""
        self._move(os.preadv, self._pieces[key.group].reads, row, into)

    def write(self, key: BlockKey, row: int, data: bytes | bytearray | memoryview) -> None:
        """Copy a block into a row that was checked; PeerError if the file cannot be written, or is
        closed."""
        self._move(os.pwritev, self._pieces[key.group].writes, row, memoryview(data))

    def close(self) -> None:
        """Close the file; waits for the row that is being copied."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)

    def _move(self, move: Move, parts: tuple[Piece, ...], row: int, data: memoryview) -> None:
        base = row * self._row_bytes
        with self._lock:
            if self._is_closed:
                raise PeerError("the engine is gone")
            for offset, places in parts:
                _all(move, self._descriptor, data, places, base + offset)

    def _check(self, hello: EngineHello, file_bytes: int) -> None:
        span = hello.row_span or hello.row_bytes
        if hello.row_bytes * (hello.num_rows - 1) + span > file_bytes:
            raise PeerError(f"{hello.num_rows} rows do not fit into {file_bytes} shared bytes")
        named = sorted(group.index for group in self.layout.groups)
        told = sorted([*hello.extents, *hello.runs, *hello.elsewhere])
        if named != told:
            raise PeerError(f"cache groups {named} with extents or runs of {told}")
        num = sum(run[3] for runs in hello.runs.values() for run in runs)
        if num > FRAGMENTS_MAX:
            raise PeerError(f"{num} fragments in a row; the limit is {FRAGMENTS_MAX}")


def _runs(hello: EngineHello, group: CacheGroup) -> Iterator[CopyRun]:
    """Copies of a group; extents are the block in its order."""
    if group.index in hello.runs:
        yield from (CopyRun(*run) for run in hello.runs[group.index])
        return
    at = 0
    for offset, length in hello.extents[group.index]:
        yield CopyRun(offset, at, length)
        at += length


def _all(
    move: Move, descriptor: int, data: memoryview, places: tuple[tuple[int, int], ...], offset: int
) -> None:
    """Move neighbouring bytes of the file from or to places of a block."""
    for begin in range(0, len(places), PLACES_MAX):
        views = [data[at : at + size] for at, size in places[begin : begin + PLACES_MAX]]
        while views:
            try:
                count = move(descriptor, views, offset)
            except OSError as error:
                raise PeerError(f"shared memory cannot be used: {error}") from None
            if not count:
                raise PeerError(f"shared memory ends at {offset}, before its last row")
            offset += count
            views = _rest(views, count)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left after the first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
