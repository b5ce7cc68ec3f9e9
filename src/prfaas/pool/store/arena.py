"""Memory for the bytes of blocks: one hard limit, no page faults once it is warm.

    arena = Arena(capacity_bytes)
    buffer = arena.allocate(num_bytes)      # writable memoryview, or None: no room

There is no `free`: a buffer's memory comes back when the last view of it is gone, so memory that
somebody still sends from or reads into is never handed out a second time. Any thread may allocate
and let go.

Buffers of one size reuse each other's pages. When room for another size is needed, pages that
nobody uses are given back to the kernel, so what the process holds stays under the limit whatever
the mix of sizes was before: each power of two has an address range of its own, as large as the
whole arena can need, and addresses without pages cost nothing. Buffers under SMALL_BYTES come from
the heap and count too. `LooseMemory` is for blocks that come while all memory is taken: outside the
arena, with its own limit.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections import deque
from functools import lru_cache

from prfaas.core.invariants import require

log = logging.getLogger(__name__)

SMALL_BYTES = 64 << 10
"""Below this, rounding up to pages would waste more than the heap does."""
PAGE_BYTES = mmap.PAGESIZE
MAP_NORESERVE = 0x4000
"""Flag of Linux: reserved addresses do not count as memory."""


class _Range:
    """Addresses for buffers of more than half of `slot_bytes`, up to `slot_bytes`."""

    def __init__(self, slot_bytes: int, capacity_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        num_slots = max(1, capacity_bytes // (slot_bytes // 2))
        self.memory = mmap.mmap(
            -1,
            num_slots * slot_bytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE,
        )
        # A huge page would keep more memory than the buffer in it.
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._unused = iter(range(0, num_slots * slot_bytes, slot_bytes))
        self._cold: list[int] = []

    def take_cold(self) -> int:
        """A slot without pages."""
        return self._cold.pop() if self._cold else next(self._unused)

    def cool(self, offset: int, num_bytes: int) -> None:
        """Give the pages of a slot back."""
        self.memory.madvise(mmap.MADV_DONTNEED, offset, num_bytes)
        self._cold.append(offset)


class Arena:
    """Hands out buffers.

    Args:
        capacity_bytes: Hard limit on all buffers together, handed out or kept for reuse; each
            counts in whole pages.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._idle_bytes = 0
        self._ranges: dict[int, _Range | None] = {}
        self._idle: dict[int, list[int]] = {}
        """Offsets of slots that have pages and no buffer, by how many bytes of pages."""
        self._own: set[int] = set()
        """Ids of the objects behind the buffers."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Size, offset and id of buffers that are gone. Filled by finalizers, which may run at any
        point of any thread and so cannot take the lock."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers that are in use."""
        with self._lock:
            self._take_back()
            return self._used

    def allocate(self, num_bytes: int) -> memoryview | None:
        """A writable buffer with arbitrary content; None if memory is full.

        Args:
            num_bytes: At least 1.
        """
        size = charged_bytes(num_bytes)
        with self._lock:
            self._take_back()
            idle = self._idle.get(size)
            if idle:
                offset = idle.pop()
                self._idle_bytes -= size
            else:
                if self._used + size > self.capacity_bytes:
                    return None
                self._cool(self._used + self._idle_bytes + size - self.capacity_bytes)
                place = self._range(size)
                offset = -1 if place is None else place.take_cold()
            self._used += size
            return self._buffer(num_bytes, size, offset)

    def owns(self, data: bytes | bytearray | memoryview) -> bool:
        """Return True if this is a buffer of this arena, or part of one."""
        if not isinstance(data, memoryview):
            return False
        with self._lock:
            self._take_back()
            return id(data.obj) in self._own

    def validate(self) -> None:
        """Check the limit, and the bytes of idle pages; AssertionError if one does not hold."""
        with self._lock:
            self._take_back()
            idle = sum(size * len(offsets) for size, offsets in self._idle.items())
            require(self._idle_bytes == idle, "bytes of idle pages")
            require(self._used + idle <= self.capacity_bytes, "limit of the arena")
            require(self._used >= 0, "bytes of buffers in use")

    def _buffer(self, num_bytes: int, size: int, offset: int) -> memoryview:
        place = self._ranges[_slot_bytes(size)] if offset >= 0 else None
        kind = _array(num_bytes)
        array = kind() if place is None else kind.from_buffer(place.memory, offset)
        self._own.add(id(array))
        gone = (size, offset, id(array))
        weakref.finalize(array, self._returned.append, gone).atexit = False
        return memoryview(array).cast("B")

    def _range(self, size: int) -> _Range | None:
        """Address range of buffers of this size; None for the heap."""
        if size < SMALL_BYTES:
            return None
        slot_bytes = _slot_bytes(size)
        if slot_bytes not in self._ranges:
            try:
                self._ranges[slot_bytes] = _Range(slot_bytes, self.capacity_bytes)
            except OSError as error:
                log.warning("blocks of %d bytes are kept on the heap: %s", size, error)
                self._ranges[slot_bytes] = None
        return self._ranges[slot_bytes]

    def _take_back(self) -> None:
        while self._returned:
            size, offset, number = self._returned.popleft()
            self._own.discard(number)
            self._used -= size
            if offset >= 0:
                self._idle.setdefault(size, []).append(offset)
                self._idle_bytes += size

    def _cool(self, num_bytes: int) -> None:
        """Release at least this many bytes of idle pages, if there are."""
        for size, offsets in self._idle.items():
            place = self._ranges[_slot_bytes(size)]
            while offsets and place is not None and num_bytes > 0:
                place.cool(offsets.pop(), size)
                self._idle_bytes -= size
                num_bytes -= size


class _Buffer(bytearray):
    """A bytearray that can be watched."""


class LooseMemory:
    """Hands out buffers. Any thread may ask.

    Args:
        capacity_bytes: Hard limit on all of them together.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._returned: deque[int] = deque()
        """Sizes of buffers that are gone. Filled by finalizers, which cannot take the lock."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers that are in use."""
        with self._lock:
            self._take_back()
            return self._used

    @staticmethod
    def owns(data: bytearray | memoryview) -> bool:
        """Return True if these bytes lie in a buffer that such a memory has handed out."""
        return isinstance(data.obj if isinstance(data, memoryview) else data, _Buffer)

    def allocate(self, num_bytes: int) -> bytearray | None:
        """A buffer; None if memory is full."""
        with self._lock:
            self._take_back()
            if self._used + num_bytes > self._capacity_bytes:
                return None
            self._used += num_bytes
        buffer = _Buffer(num_bytes)
        weakref.finalize(buffer, self._returned.append, num_bytes).atexit = False
        return buffer

    def _take_back(self) -> None:
        while self._returned:
            self._used -= self._returned.popleft()


def charged_bytes(num_bytes: int) -> int:
    """Share of the capacity of a buffer of that many bytes."""
    return num_bytes if num_bytes < SMALL_BYTES else -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _slot_bytes(size: int) -> int:
    return 1 << (size - 1).bit_length()


@lru_cache(maxsize=64)
def _array(num_bytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * num_bytes
