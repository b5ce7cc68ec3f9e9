"""Requests as they come: by themselves, or a while after the one they wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import FollowUp, Request

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
