"""Share of time that a thread needs a core: running, or waiting for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from prfaas.units import NS_PER_S

SAMPLE_NS_MIN = NS_PER_S // 25
"""Shorter spans measure the scheduler more than the thread."""


class BusyMeter:
    """Measures one thread of this process.

    Linux counts for each thread the nanoseconds it ran and those it waited in a run queue
    (`Documentation/scheduler/sched-stats.rst`); a kernel without the second counts the first.

    Args:
        thread_id: Its native id; None before it has begun.
    """

    def __init__(
        self, thread_id: Callable[[], int | None], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._thread_id = thread_id
        self._clock_ns = clock_ns
        self._last = 0, 0
        self._share = 0.0

    def share(self) -> float:
        """Return the share of time, in [0, 1], since the call before; 0 if it is not known."""
        now, needed = self._clock_ns(), self._needed_ns()
        before, needed_before = self._last
        if needed is None:
            return 0.0
        if now - before >= SAMPLE_NS_MIN:
            if before:
                self._share = max(0.0, min(1.0, (needed - needed_before) / (now - before)))
            self._last = now, needed
        return self._share

    def _needed_ns(self) -> int | None:
        number = self._thread_id()
        if number is None:
            return None
        try:
            counts = Path(f"/proc/self/task/{number}/schedstat").read_text(encoding="ascii")
            ran, waited = counts.split()[:2]
            return int(ran) + int(waited)
        except (OSError, ValueError):
            return None
