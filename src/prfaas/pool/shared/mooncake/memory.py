"""Memory that a pool node and the process of its client share.

Bytes go through it once: blocks are sealed into it and opened from it, and the native library sends
and receives there. A buffer that the library may still write to is never reused.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from bisect import insort


class ClientMemory:
    """Two halves, one for what is written and one for what is read."""

    def __init__(self, num_bytes: int) -> None:
        page = mmap.PAGESIZE
        half = num_bytes // 2 // page * page
        self.num_bytes = 2 * half
        self.descriptor = os.memfd_create("prfaas-mooncake")
        os.ftruncate(self.descriptor, self.num_bytes)
        self._map = mmap.mmap(self.descriptor, self.num_bytes)
        self._view = memoryview(self._map)
        self.writes, self.reads = Buffers(0, half), Buffers(half, half)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Part of the memory."""
        return self._view[offset : offset + num_bytes]

    def close(self) -> None:
        """Close the descriptor; the memory goes with its last user."""
        os.close(self.descriptor)


class Buffers:
    """Hands out parts of a range, first fit. Lives on one event loop.

    Args:
        start: Offset of the range.
    """

    def __init__(self, start: int, num_bytes: int) -> None:
        self.capacity_bytes = num_bytes
        self._free = [(start, num_bytes)]
        """Offset and size of free parts, in order, none beside another."""
        self._waiters: list[asyncio.Future[None]] = []

    def take(self, num_bytes: int) -> int | None:
        """Offset of a buffer; None if there is no room at present."""
        size = _rounded(num_bytes)
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                rest = [(offset + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                return offset
        return None

    async def taken(self, num_bytes: int) -> int:
        """Offset of a buffer, once there is room.

        Args:
            num_bytes: At most the capacity.
        """
        while (offset := self.take(num_bytes)) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free a buffer."""
        insort(self._free, (offset, _rounded(num_bytes)))
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((start, size))
        self._free = joined
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
