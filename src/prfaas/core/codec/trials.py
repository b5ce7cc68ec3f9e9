"""Trials of coding by cache group, at growing intervals after failures."""

from __future__ import annotations

from collections import OrderedDict

GROUPS_MAX = 1024
"""Groups remembered at once, of all layouts; the one that was used least recently is forgotten."""
SKIPPED_MAX = 1024
"""Fragments of a group that are sent untried between two trials, at most."""


class Trials:
    """Remembers of each group how many fragments to send raw before the next trial."""

    def __init__(self) -> None:
        self._skips: OrderedDict[tuple[bytes, int], tuple[int, int]] = OrderedDict()
        """By layout and group, how many to skip still, and how many after the next failure."""

    def should_try(self, layout_id: bytes, group: int) -> bool:
        """Return True if the next fragment of the group should be coded; counts the others."""
        left, after = self._skips.get((layout_id, group), (0, 1))
        if not left:
            return True
        self._skips[layout_id, group] = left - 1, after
        return False

    def tried(self, layout_id: bytes, group: int, *, has_shrunk: bool) -> None:
        """Take the result of a trial."""
        name = layout_id, group
        if has_shrunk:
            self._skips.pop(name, None)
            return
        _, after = self._skips.get(name, (0, 1))
        self._skips[name] = after, min(2 * after, SKIPPED_MAX)
        self._skips.move_to_end(name)
        if len(self._skips) > GROUPS_MAX:
            self._skips.popitem(last=False)
