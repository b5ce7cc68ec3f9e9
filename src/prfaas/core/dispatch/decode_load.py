"""Spreads requests over decode instances by how many each has been given."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


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
        heapify(self._heap)

    def choose(self, avoid: str = "") -> str | None:
        """The ready instance with the fewest requests gets one more; None without any."""
        passed, chosen = False, None
        while self._heap and chosen is None:
            count, name = heappop(self._heap)
            if name == avoid:
                passed = True
            elif self._ready[name] and count == self._counts[name]:
                chosen = name
        if passed:
            self._change(avoid, 0)
        if chosen is not None:
            self._change(chosen, 1)
        return chosen

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
        heappush(self._heap, (self._counts[name], name))
