"""The memory that an instance shares with its pool node: rows of one block each."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque

from prfaas.core.kv.blocks import Layout
from prfaas.errors import ConfigError


class Rows:
    """Rows and their owners, in order of requests.

    Args:
        name: For the system's list of open files.
        layout: Layout of their blocks.
        num_bytes: Memory for all of them.

    Raises:
        ConfigError: Not a single row fits.
    """

    def __init__(self, name: str, layout: Layout, num_bytes: int) -> None:
        self.row_bytes = max(group.block_bytes for group in layout.groups)
        self.num_rows = num_bytes // self.row_bytes
        if not self.num_rows:
            raise ConfigError(
                f"a block of {name} has {self.row_bytes} bytes, its host memory {num_bytes}; "
                "give it more with host_memory, or make blocks smaller with bytes_scale"
            )
        self.extents = {group.index: [(0, group.block_bytes)] for group in layout.groups}
        self._sizes = {group.index: group.block_bytes for group in layout.groups}
        self.descriptor = os.memfd_create(name)
        os.truncate(self.descriptor, self.row_bytes * self.num_rows)
        self._memory = mmap.mmap(self.descriptor, self.row_bytes * self.num_rows)
        self._free = list(range(self.num_rows))
        self._queue: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    async def take(self, count: int) -> list[int]:
        """Wait for free rows.

        Args:
            count: How many; at most `num_rows`.
        """
        if not self._queue and count <= len(self._free):
            return self._pop(count)
        taken: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._queue.append((count, taken))
        try:
            return await taken
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled():
                self.give(taken.result())
            raise

    def give(self, rows: list[int]) -> None:
        """Give rows back."""
        self._free += rows
        while self._queue:
            count, taken = self._queue[0]
            if not taken.cancelled() and count > len(self._free):
                return
            self._queue.popleft()
            if not taken.cancelled():
                taken.set_result(self._pop(count))

    @property
    def num_free(self) -> int:
        """Free rows."""
        return len(self._free)

    def write(self, row: int, data: bytes) -> None:
        """Fill a row."""
        start = row * self.row_bytes
        self._memory[start : start + len(data)] = data

    def read(self, row: int, group: int) -> bytes:
        """The block of a cache group in a row."""
        start = row * self.row_bytes
        return self._memory[start : start + self._sizes[group]]

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
        os.close(self.descriptor)

    def _pop(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken
