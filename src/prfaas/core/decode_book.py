"""Spreads requests over decode instances by how many each has been given, and knows their wait."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_WAIT_WEIGHT = 0.2
"""Weight of the newest wait in the mean."""


class DecodeBook:
    """Counts of assigned requests; the smallest is found in O(log instances).

    Args:
        names: The instances.
        stale_after_ns: Age beyond which a wait says nothing.
    """

    def __init__(self, names: list[str], stale_after_ns: int) -> None:
        self._stale_after_ns = stale_after_ns
        self._wait_ns, self._waited_at_ns = 0.0, -stale_after_ns - 1
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

    def waited(self, waited_ns: int, now_ns: int) -> None:
        """A request began to be decoded so long after its blocks were there."""
        stale = now_ns - self._waited_at_ns > self._stale_after_ns
        self._wait_ns += (1.0 if stale else _WAIT_WEIGHT) * (waited_ns - self._wait_ns)
        self._waited_at_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """How long requests waited lately; 0 when none has begun for a while."""
        return 0 if now_ns - self._waited_at_ns > self._stale_after_ns else round(self._wait_ns)

    @property
    def num_assigned(self) -> int:
        """Requests assigned and not left."""
        return sum(self._counts.values())

    def _change(self, name: str, by: int) -> None:
        self._counts[name] += by
        heappush(self._heap, (self._counts[name], name))
