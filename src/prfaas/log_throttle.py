"""Keeping a log from repeating itself: who is refused tries again, and again."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_NS = 60 * 10**9
TEXTS_MAX = 50
"""Different things said in that time; strangers choose part of the words."""


class LogThrottle:
    """Logs each message at most once in an interval.

    Args:
        every_ns: How long a thing is not said again, nanoseconds.
    """

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, every_ns: int = EVERY_NS
    ) -> None:
        self._clock_ns, self._every_ns = clock_ns, every_ns
        self._said: dict[str, int] = {}

    def is_new(self, text: str) -> bool:
        """Return True if the message should be logged; then False for an interval."""
        now = self._clock_ns()
        self._said = {one: at for one, at in self._said.items() if now - at < self._every_ns}
        if text in self._said or len(self._said) >= TEXTS_MAX:
            return False
        self._said[text] = now
        return True
