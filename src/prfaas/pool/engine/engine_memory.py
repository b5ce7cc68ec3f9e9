"""An engine's shared memory: rows, and the place of blocks in them.

The file is read and written, never mapped: an engine that makes its file shorter, or dies while it
makes it, would otherwise end whoever touches the pages that are gone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from prfaas.core.kv.blocks import BlockKey, Layout
from prfaas.errors import PeerError
from prfaas.wire.messages.engine import EngineHello
from prfaas.wire.messages.fields import Extent

Move = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


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
        try:
            self._check(hello, os.fstat(descriptor).st_size)
        except (OSError, PeerError) as error:
            self.close()
            raise PeerError(f"shared memory cannot be used: {error}") from None
        self._extents = {group: _merged(extents) for group, extents in hello.extents.items()}

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of `group`.

        Raises:
            PeerError: There is no such group.
        """
        if group not in self._extents:
            raise PeerError(f"cache group {group}; the engine announced {sorted(self._extents)}")
        return sum(length for _, length in self._extents[group])

    def check(self, key: BlockKey, row: int) -> None:
        """Return True if there is such a group and such a row.

        Raises:
            PeerError: There is not.
        """
        self.block_bytes(key.group)
        if not 0 <= row < self._num_rows:
            raise PeerError(f"row {row}; the engine announced {self._num_rows}")

    def read(self, key: BlockKey, row: int, into: memoryview) -> None:
        """Copy a block out of a row that was checked, into a buffer of its size.

        Raises:
            PeerError: The file ends before the row does, or is closed.
        """
        self._move(os.preadv, key, row, into)

    def write(self, key: BlockKey, row: int, data: bytes | bytearray | memoryview) -> None:
        """Copy a block into a row that was checked.

        Raises:
            PeerError: The file cannot be written, or is closed.
        """
        self._move(os.pwritev, key, row, memoryview(data))

    def close(self) -> None:
        """Close the file; waits for the row that is being copied."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)

    def _move(self, move: Move, key: BlockKey, row: int, data: memoryview) -> None:
        base = row * self._row_bytes
        with self._lock:
            if self._is_closed:
                raise PeerError("the engine is gone")
            for offset, length in self._extents[key.group]:
                _all(move, self._descriptor, data[:length], base + offset)
                data = data[length:]

    def _check(self, hello: EngineHello, file_bytes: int) -> None:
        if hello.row_bytes * hello.num_rows > file_bytes:
            raise PeerError(f"{hello.num_rows} rows do not fit into {file_bytes} shared bytes")
        named = sorted(group.index for group in self.layout.groups)
        if named != sorted(hello.extents):
            raise PeerError(f"cache groups {named} with extents of {sorted(hello.extents)}")
        for group in self.layout.groups:
            extents = hello.extents[group.index]
            if any(offset + length > hello.row_bytes for offset, length in extents):
                raise PeerError(f"cache group {group.index} reaches beyond its row")
            if sum(length for _, length in extents) != group.block_bytes:
                raise PeerError(f"extents of cache group {group.index} are not its block size")


def _merged(extents: list[Extent]) -> list[Extent]:
    """The same with neighbours as one: each is a system call."""
    merged: list[Extent] = []
    for offset, length in extents:
        if merged and sum(merged[-1]) == offset:
            merged[-1] = merged[-1][0], merged[-1][1] + length
        else:
            merged.append((offset, length))
    return merged


def _all(move: Move, descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            count = move(descriptor, [data], offset)
        except OSError as error:
            raise PeerError(f"shared memory cannot be used: {error}") from None
        if not count:
            raise PeerError(f"shared memory ends at {offset}, before its last row")
        data, offset = data[count:], offset + count
