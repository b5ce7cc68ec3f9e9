"""The virtual clock, one heap of events in integer nanoseconds, and the arrivals on it.

Events at the same instant happen in the order they were asked for, so a run depends on nothing but
its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from prfaas.sim.system.request import FollowUp, Request

Action = Callable[[Any], None]
NEVER = 2**61
"""An instant after all others, ns."""


class Clock:
    """Virtual time and what will happen."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action, Any]] = []
        self._num_asked = 0
        self._end_ns = NEVER

    @property
    def num_events(self) -> int:
        """Events that have happened."""
        return self._num_asked - len(self._heap)

    def at(self, at_ns: int, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` at an instant; ValueError if the instant has passed."""
        if at_ns < self.now_ns:
            raise ValueError(f"an event at {at_ns} ns was asked for at {self.now_ns} ns")
        self._num_asked += 1
        heappush(self._heap, (at_ns, self._num_asked, action, argument))

    def after(self, delay_ns: int, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` after a delay; ValueError if the delay is negative."""
        if delay_ns < 0:
            raise ValueError(f"an event was asked for {-delay_ns} ns ago")
        self._num_asked += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._num_asked, action, argument))

    def go(self, stop_at_ns: int | None = None) -> None:
        """Process events until `stop` is called, or up to a time."""
        heap, pop = self._heap, heappop
        self._end_ns = NEVER if stop_at_ns is None else stop_at_ns
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


Progress = Callable[[int], None]


class Arrivals:
    """Schedules arrivals.

    Args:
        roots: Those that come by themselves, in order of arrival.
        on_progress: Called with the number of roots that have come, now and then.
    """

    def __init__(
        self,
        clock: Clock,
        roots: Sequence[Request],
        on_come: Callable[[Request], None],
        on_progress: Progress | None = None,
    ) -> None:
        self._clock, self._roots = clock, tuple(roots)
        self._on_come, self._on_progress = on_come, on_progress
        self._next = self._num_expected = 0

    @property
    def num_left(self) -> int:
        """Requests that will certainly come."""
        return len(self._roots) - self._next + self._num_expected

    def start(self) -> None:
        """Schedule the first arrival."""
        if self._roots:
            self._clock.at(self._roots[0].arrived_at_ns, self._arrive)

    def ended(self, request: Request) -> None:
        """Schedule requests that wait for an ended one, before the end of the run."""
        for follower in request.followers:
            if self._clock.now_ns + follower.after_ns < follower.until_ns:
                self._num_expected += 1
                self._clock.after(follower.after_ns, self._follow, follower)

    def _arrive(self, _argument: None) -> None:
        request = self._roots[self._next]
        self._next += 1
        if self._next < len(self._roots):
            self._clock.at(self._roots[self._next].arrived_at_ns, self._arrive)
        if self._on_progress is not None and self._next % 256 == 0:
            self._on_progress(self._next)
        self._on_come(request)

    def _follow(self, follower: FollowUp) -> None:
        self._num_expected -= 1
        follower.request.arrived_at_ns = self._clock.now_ns
        self._on_come(follower.request)
