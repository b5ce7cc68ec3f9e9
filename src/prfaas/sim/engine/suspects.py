"""Prompts that an instance died with: they wait for their turn, by the core's quarantine."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from prfaas.core.resilience.quarantine import PAUSE_NS, SURVIVED_NS, Quarantine
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request


class Suspect(Protocol):
    """A request whose instance died before its first token."""

    request: Request

    def turn_came(self, *, is_refused: bool = False) -> None:
        """It may go on, or may not."""


class Suspects:
    """Suspects of a run; each prompt is taken for another one.

    Args:
        clock: Virtual time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._quarantine = clock, Quarantine()
        self._waiting: deque[Suspect] = deque()

    def killed(self, run: Suspect, engine: str) -> None:
        """An instance died with a request; its turn comes later, or never."""
        digest, now_ns = _digest(run.request.index), self._clock.now_ns
        self._quarantine.killed(digest, (engine, now_ns), 1, now_ns)
        if self._quarantine.refused_ns(digest, now_ns):
            run.turn_came(is_refused=True)
        else:
            self._clock.after(PAUSE_NS, self._wait, run)

    def cleared(self, index: int) -> None:
        """A request has its first token."""
        if len(self._quarantine):
            self._quarantine.cleared(_digest(index))
            self._next()

    def left(self, index: int) -> None:
        """A request is over."""
        if len(self._quarantine):
            self._quarantine.left(_digest(index))
            self._next()

    def _survived(self, index: int) -> None:
        self._quarantine.survived(_digest(index))
        self._next()

    def _wait(self, run: Suspect) -> None:
        self._waiting.append(run)
        self._next()

    def _next(self) -> None:
        while self._waiting and self._quarantine.begin(_digest(self._waiting[0].request.index)):
            run = self._waiting.popleft()
            self._clock.after(SURVIVED_NS, self._survived, run.request.index)
            run.turn_came()


def _digest(index: int) -> bytes:
    return index.to_bytes(8)
