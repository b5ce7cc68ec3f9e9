"""Spreads requests over decode instances by how many each has been given."""

from __future__ import annotations

import heapq


class Balancer:
    """Counts of assigned requests; the smallest is found in O(log instances).

    Args:
        num_instances: Instances, by index.
    """

    def __init__(self, num_instances: int) -> None:
        self._counts = [0] * num_instances
        self._up = [True] * num_instances
        self._heap = [(0, index) for index in range(num_instances)]

    def choose(self) -> int | None:
        """The healthy instance with the fewest requests gets one more; None without any."""
        while self._heap:
            count, index = heapq.heappop(self._heap)
            if self._up[index] and count == self._counts[index]:
                self._change(index, 1)
                return index
        return None

    def leave(self, index: int) -> None:
        """An instance has one request less."""
        self._change(index, -1)

    def set_up(self, index: int, *, up: bool) -> None:
        """An instance became healthy, or stopped being so."""
        self._up[index] = up
        self._change(index, 0)

    @property
    def num_assigned(self) -> int:
        """Requests assigned and not left."""
        return sum(self._counts)

    def _change(self, index: int, by: int) -> None:
        self._counts[index] += by
        heapq.heappush(self._heap, (self._counts[index], index))
