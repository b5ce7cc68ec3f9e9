"""Sources whose blocks verification does not reach: a share of unknown results, or ends that avoid
it.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

WINDOW = 12
"""Verifications of a source that are judged together."""
UNKNOWN_MAX = WINDOW // 2
"""Unknown ones among them that are no alarm."""
STOPPED_MAX = 2
"""Transfers among them that the source may stop once all blocks are there."""
SOURCES_MAX = 1000


class Suspicion(StrEnum):
    """Reason of an alarm; labels a metric."""

    UNKNOWN = "unknown"
    """Most of its transfers could not be compared."""
    NOT_COMMITTED = "not_committed"
    """Its transfers end without a commit although all blocks have arrived."""


class Suspicions:
    """Counts the verifications of each source; the one that began first is forgotten."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, list[int]] = OrderedDict()

    def add(self, source: str, *, is_unknown: bool, is_stopped: bool) -> Suspicion | None:
        """Count a verification; return the reason of an alarm, which begins a new window.

        Args:
            source: Pool that sent blocks.
            is_unknown: True if nothing could be compared.
            is_stopped: True if its transfer ended without a commit though all blocks are there.
        """
        counts = self._counts.setdefault(source, [0, 0, 0])
        for place, value in enumerate((1, is_unknown, is_stopped)):
            counts[place] += value
        if len(self._counts) > SOURCES_MAX:
            self._counts.popitem(last=False)
        num, num_unknown, num_stopped = counts
        found = None
        if num_stopped > STOPPED_MAX:
            found = Suspicion.NOT_COMMITTED
        elif num_unknown > UNKNOWN_MAX:
            found = Suspicion.UNKNOWN
        if found or num >= WINDOW:
            self._counts.pop(source, None)
        return found
