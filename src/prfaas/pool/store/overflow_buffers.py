"""Buffers for blocks that come while all memory is taken: outside the arena, with their own limit.

Their memory comes back when the last view of it is gone, as that of the arena does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque


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
