"""A virtual clock: one heap of events, in integer nanoseconds.

Events at the same instant happen in the order they were asked for, so a run depends on nothing but
its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]


class Clock:
    """Virtual time and what will happen."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action, Any]] = []
        self._num_asked = 0
        self._end_ns = float("inf")

    @property
    def num_events(self) -> int:
        """Events that have happened."""
        return self._num_asked - len(self._heap)

    def at(self, at_ns: int, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` at an instant.

        Raises:
            ValueError: The instant has passed.
        """
        if at_ns < self.now_ns:
            raise ValueError(f"an event at {at_ns} ns was asked for at {self.now_ns} ns")
        self._num_asked += 1
        heappush(self._heap, (at_ns, self._num_asked, action, argument))

    def after(self, delay_ns: int, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` after a delay.

        Raises:
            ValueError: The delay is negative.
        """
        if delay_ns < 0:
            raise ValueError(f"an event was asked for {-delay_ns} ns ago")
        self._num_asked += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._num_asked, action, argument))

    def go(self, stop_at_ns: int | None = None) -> None:
        """Process events until `stop` is called, or up to a time."""
        heap, pop = self._heap, heappop
        self._end_ns = float("inf") if stop_at_ns is None else stop_at_ns
        while heap and self.now_ns < self._end_ns:
            self.now_ns, _, action, argument = pop(heap)
            action(argument)

    def stop(self) -> None:
        """Stop the clock."""
        self._end_ns = self.now_ns

    def run(self, until_ns: int) -> None:
        """Process events up to a time, and stop."""
        while self._heap and self._heap[0][0] <= until_ns:
            self.now_ns, _, action, argument = heappop(self._heap)
            action(argument)
        self.now_ns = max(self.now_ns, until_ns)
