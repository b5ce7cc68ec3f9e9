"""Prompts that an instance died with wait for their turn, by the core's quarantine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prfaas.core.resilience.quarantine import PAUSE_NS, SURVIVED_NS, Quarantine
from prfaas.sim.system.clock import Clock


class SimulatedSuspects:
    """Suspects of a run, by index of their request: no two requests have the same prompt.

    Args:
        go_on: Called with a request that may run again, or with one that is refused and False.
    """

    def __init__(self, clock: Clock, go_on: Callable[[int, bool], None]) -> None:
        self._clock, self._go_on, self._quarantine = clock, go_on, Quarantine()
        self._waiting: deque[int] = deque()
        self.are_there = False
        """True from the first time that an instance died with a request."""

    def killed(self, index: int, engine: str) -> None:
        """An instance died with a request that had no first token yet."""
        digest, now_ns, self.are_there = _digest(index), self._clock.now_ns, True
        self._quarantine.killed(digest, (engine, now_ns), 1, now_ns)
        if self._quarantine.refused_ns(digest, now_ns):
            self._go_on(index, False)
        else:
            self._clock.after(PAUSE_NS, self._wait, index)

    def left(self, index: int, *, is_cleared: bool = False) -> None:
        """A request is over, or cleared by its first token."""
        (self._quarantine.cleared if is_cleared else self._quarantine.left)(_digest(index))
        self._next()

    def _survived(self, index: int) -> None:
        self._quarantine.survived(_digest(index))
        self._next()

    def _wait(self, index: int) -> None:
        self._waiting.append(index)
        self._next()

    def _next(self) -> None:
        while self._waiting and self._quarantine.begin(_digest(self._waiting[0])):
            index = self._waiting.popleft()
            self._clock.after(SURVIVED_NS, self._survived, index)
            self._go_on(index, True)


def _digest(index: int) -> bytes:
    return index.to_bytes(8)
