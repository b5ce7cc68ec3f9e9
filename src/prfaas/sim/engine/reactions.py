"""Reactions to failures in a run: counts, and prompts that an instance died with."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from prfaas.core.request.actions import FellBack
from prfaas.core.request.events import AnyEvent, Outcome, Stopped, TurnCame
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.resilience.quarantine import PAUSE_NS, SURVIVED_NS, Quarantine, Target, label_of
from prfaas.sim.system.clock import Clock


class Reactions:
    """Counts of the actions of the machine and the breakers, as in the gateway's metrics."""

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()
        """Routes that were left or did not pay off, by "stage/reason"."""
        self.retries: Counter[str] = Counter()
        """Decode legs that ran again ("made"), or might not ("over_budget")."""
        self.opened: Counter[str] = Counter()
        """Number of openings of a target's breaker."""
        self.touched: set[int] = set()
        """Requests that fell back in any way."""
        self.num_recomputed = 0
        """Prompts that an instance that decodes computed, in whole or in part."""

    def fell_back(self, index: int, action: FellBack) -> None:
        """A request left its route."""
        self.touched.add(index)
        self.fallbacks[f"{action.stage}/{action.reason}"] += 1

    def retried(self, *, is_allowed: bool) -> None:
        """A decode leg was to run again."""
        self.retries["made" if is_allowed else "over_budget"] += 1

    def changed(self, target: Target, _before: BreakerState, after: BreakerState) -> None:
        """A breaker changed."""
        if after is BreakerState.OPEN:
            self.opened[label_of(target)] += 1


class SimulatedSuspects:
    """Suspects of a run, by index of their request: no two requests have the same prompt.

    Args:
        report: Called with a request, and the event that it may run again or is refused.
    """

    def __init__(self, clock: Clock, report: Callable[[int, AnyEvent], None]) -> None:
        self._clock, self._report, self._quarantine = clock, report, Quarantine()
        self._waiting: deque[int] = deque()
        self.are_there = False
        """True from the first time that an instance died with a request."""

    def killed(self, index: int, engine: str) -> None:
        """An instance died with a request that had no first token yet."""
        digest, now_ns, self.are_there = _digest(index), self._clock.now_ns, True
        self._quarantine.killed(digest, (engine, now_ns), 1, now_ns)
        if self._quarantine.refused_ns(digest, now_ns):
            self._report(index, Stopped(Outcome.FAILED))
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
            self._report(index, TurnCame())


def _digest(index: int) -> bytes:
    return index.to_bytes(8)
