"""Spreads requests over decode instances by how many each has been given."""

from __future__ import annotations

import heapq


class DecodeBook:
    """Counts of assigned requests; the smallest is found in O(log instances).

    Args:
        names: The instances.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = tuple(names)
        self._counts = dict.fromkeys(names, 0)
        self._ready = dict.fromkeys(names, True)
        self._heap = [(0, name) for name in names]
        heapq.heapify(self._heap)

    def choose(self) -> str | None:
        """The ready instance with the fewest requests gets one more; None without any."""
        while self._heap:
            count, name = heapq.heappop(self._heap)
            if self._ready[name] and count == self._counts[name]:
                self._change(name, 1)
                return name
        return None

    def leave(self, name: str) -> None:
        """An instance has one request less."""
        self._change(name, -1)

    def set_ready(self, name: str, *, ready: bool) -> None:
        """An instance became healthy, or stopped being so."""
        self._ready[name] = ready
        self._change(name, 0)

    @property
    def num_assigned(self) -> int:
        """Requests assigned and not left."""
        return sum(self._counts.values())

    def _change(self, name: str, by: int) -> None:
        self._counts[name] += by
        heapq.heappush(self._heap, (self._counts[name], name))
