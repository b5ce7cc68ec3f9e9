"""Selection of the transfers that are verified: one in each window of N, of every source.

A source cannot know which transfer of a window is selected. If it alters a_1, a_2, ... transfers of
successive windows of N, none of them is selected with a probability of the product of 1 - a_i / N,
at most (1 - 1 / N) to the power of all altered ones: 0.64 % for 250 altered ones at N = 50.
"""

from __future__ import annotations

from collections.abc import Callable

SOURCES_MAX = 1000
"""Sources with a window; the one that began first is forgotten."""


class Sampler:
    """Selects transfers.

    Args:
        one_in: N, at least 1.
        draw: Returns a random number below its argument that no source can predict.
    """

    def __init__(self, one_in: int, draw: Callable[[int], int]) -> None:
        self._one_in, self._draw = one_in, draw
        self._windows: dict[str, tuple[int, int]] = {}
        """By source, the number of transfers in its window so far and the one to select."""

    def takes(self, source: str) -> bool:
        """Count a transfer of a source; True if it is to be verified."""
        count, selected = self._windows.get(source) or (0, self._draw(self._one_in))
        if count + 1 < self._one_in:
            self._windows[source] = count + 1, selected
        else:
            self._windows.pop(source, None)
        if len(self._windows) > SOURCES_MAX:
            del self._windows[next(iter(self._windows))]
        return count == selected
