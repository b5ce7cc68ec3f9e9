"""Keeping a log from repeating itself: who is refused tries again, and again."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_NS = 60 * 10**9
TEXTS_MAX = 50
"""Different things said in that time; strangers choose part of the words."""


class SaidOnce:
    """Says each thing once a minute.

    Args:
        clock_ns: Monotonic clock, nanoseconds.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._said: dict[str, int] = {}

    def is_new(self, text: str) -> bool:
        """Whether this is worth a line; the answer is no for the next minute."""
        now = self._clock_ns()
        self._said = {one: at for one, at in self._said.items() if now - at < EVERY_NS}
        if text in self._said or len(self._said) >= TEXTS_MAX:
            return False
        self._said[text] = now
        return True
