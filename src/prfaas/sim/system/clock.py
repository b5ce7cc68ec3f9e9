"""The virtual clock, one heap of events in integer nanoseconds, and the arrivals on it.

Events at the same instant happen in the order they were asked for, so a run depends on nothing but
its inputs. The heap has instants alone: numbers are compared in a third of the time of tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from prfaas.sim.system.request import FollowUp, Request

Action = Callable[[Any], None]
"""What happens. That of an object which asks often is made once: a method is bound anew each time
that it is read."""
NEVER = 2**61
"""An instant after all others, ns."""


class Clock:
    """Virtual time and what will happen."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[Any] = []
        """Instants, once for each event. Of any type: compiled, whole numbers that are read as such
        would be made anew for each use."""
        self._due: dict[Any, tuple[Action, Any]] = {}
        """The first event of each instant."""
        self._others: dict[Any, list[tuple[Action, Any]]] = {}
        """Those after it."""
        self.num_events = 0
        """Events that have happened when `go` ends."""
        self._end_ns = NEVER

    def at(self, at_ns: int, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` at an instant; ValueError if the instant has passed."""
        if at_ns < self.now_ns:
            raise ValueError(f"an event at {at_ns} ns was asked for at {self.now_ns} ns")
        instant: Any = at_ns
        heappush(self._heap, instant)
        if instant in self._due:
            self._others.setdefault(instant, []).append((action, argument))
        else:
            self._due[instant] = action, argument

    def after(self, delay_ns: int, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` after a delay; ValueError if the delay is negative."""
        self.at(self.now_ns + delay_ns, action, argument)

    def go(self, stop_at_ns: int | None = None) -> None:
        """Process events until `stop` is called, or up to a time."""
        heap, due, others = self._heap, self._due, self._others
        self._end_ns, num_events = NEVER if stop_at_ns is None else stop_at_ns, 0
        while heap and self.now_ns < self._end_ns:
            instant = heappop(heap)
            self.now_ns = instant
            action, argument = due[instant]
            if instant in others:
                self._bring_next(instant)
            else:
                del due[instant]
            num_events += 1
            action(argument)
        self.num_events += num_events

    def stop(self) -> None:
        """Stop the clock."""
        self._end_ns = self.now_ns

    def run(self, until_ns: int) -> None:
        """Process events up to a time, and stop."""
        while self._heap and self._heap[0] <= until_ns:
            self.now_ns = instant = heappop(self._heap)
            action, argument = self._due[instant]
            if instant in self._others:
                self._bring_next(instant)
            else:
                del self._due[instant]
            action(argument)
        self.now_ns = max(self.now_ns, until_ns)

    def _bring_next(self, instant: Any) -> None:
        """Of several events of an instant, the second one becomes the first."""
        others = self._others[instant]
        self._due[instant] = others.pop(0)
        if not others:
            del self._others[instant]


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
        self._arriving: Action = self._arrive

    @property
    def num_left(self) -> int:
        """Requests that will certainly come."""
        return len(self._roots) - self._next + self._num_expected

    def start(self) -> None:
        """Schedule the first arrival."""
        if self._roots:
            self._clock.at(self._roots[0].arrived_at_ns, self._arriving)

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
            self._clock.at(self._roots[self._next].arrived_at_ns, self._arriving)
        if self._on_progress is not None and self._next % 256 == 0:
            self._on_progress(self._next)
        self._on_come(request)

    def _follow(self, follower: FollowUp) -> None:
        self._num_expected -= 1
        follower.request.arrived_at_ns = self._clock.now_ns
        self._on_come(follower.request)
