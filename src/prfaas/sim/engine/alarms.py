"""Alarms of requests on the virtual clock: nearly all are moved or cancelled before they are due.

So they wait in lists by their second, and only those that are still wanted when it begins become
events of the clock. Every alarm goes off at its instant.
"""

from __future__ import annotations

from typing import Protocol

from prfaas.sim.system.clock import Clock
from prfaas.units import NS_PER_S


class Sleeper(Protocol):
    """Owner of an alarm; `wakes_at_ns` is its time, ns, None for never."""

    wakes_at_ns: int | None

    def wake(self, at_ns: int) -> None:
        """The instant has come that was asked for."""


class Alarms:
    """All alarms of a run.

    Args:
        clock: Virtual time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_second: dict[int, list[tuple[int, Sleeper]]] = {}

    def set(self, sleeper: Sleeper, at_ns: int) -> None:
        """Wake somebody at an instant, unless he wants another one by then."""
        second = at_ns // NS_PER_S
        waiting = self._by_second.get(second)
        if waiting is not None:
            waiting.append((at_ns, sleeper))
        elif second * NS_PER_S > self._clock.now_ns:
            self._by_second[second] = [(at_ns, sleeper)]
            self._clock.at(second * NS_PER_S, self._begin, second)
        else:
            self._clock.at(at_ns, sleeper.wake, at_ns)

    def _begin(self, second: int) -> None:
        for at_ns, sleeper in self._by_second.pop(second):
            if sleeper.wakes_at_ns == at_ns:
                self._clock.at(at_ns, sleeper.wake, at_ns)
