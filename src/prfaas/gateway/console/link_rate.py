"""Rate of a link from a counter of delivered bytes, averaged over a fixed window."""

from __future__ import annotations

from collections import deque

from prfaas.units import BITS_PER_BYTE

WINDOW_S = 5.0
"""Length of the average, seconds. Transfers of a demo take one; samples come once a second."""


class LinkFlow:
    """Bytes that a link delivered, and their rate over the last `WINDOW_S` seconds.

    The counter is that of the sending pool's connections, and restarts when they do.
    """

    def __init__(self) -> None:
        self._counter: int | None = None
        self._totals: deque[tuple[float, int]] = deque()
        self.delivered_bytes = 0
        """Since the first look; never falls."""

    def look(self, now_s: float, counter: int) -> None:
        """Take the counter's value in.

        Args:
            now_s: Any clock that does not go back, seconds.
            counter: Bytes that the connections of this moment delivered, at least 0.
        """
        if self._counter is not None:
            began_anew = counter < self._counter
            self.delivered_bytes += counter if began_anew else counter - self._counter
        self._counter = counter
        self._totals.append((now_s, self.delivered_bytes))
        while len(self._totals) > 2 and self._totals[1][0] <= now_s - WINDOW_S:
            self._totals.popleft()

    @property
    def bits_per_s(self) -> float:
        """Mean over the window, or over the life of a newer link; 0 after one sample."""
        if len(self._totals) < 2:
            return 0.0
        (then, before), (now, after) = self._totals[0], self._totals[-1]
        return (after - before) * BITS_PER_BYTE / (now - then) if now > then else 0.0
