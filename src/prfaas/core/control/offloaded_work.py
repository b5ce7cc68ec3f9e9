"""Offloaded prefill below the threshold: work that would otherwise load the PD cluster.

A stage that is relieved over a busy link looks idle. What it was spared belongs to what it needs.
"""

from __future__ import annotations


class Spared:
    """Turns work that was spared so far into instances' worth of it since the last look."""

    def __init__(self) -> None:
        self._total_ns, self._at_ns = 0, 0

    def look(self, total_ns: int, now_ns: int) -> float:
        """Instances that would have been busy with it, mean since the last look.

        Args:
            total_ns: Work that was spared so far, in time of one instance; never falls.
        """
        spared_ns, elapsed_ns = total_ns - self._total_ns, now_ns - self._at_ns
        self._total_ns, self._at_ns = total_ns, now_ns
        return spared_ns / elapsed_ns if elapsed_ns > 0 else 0.0
