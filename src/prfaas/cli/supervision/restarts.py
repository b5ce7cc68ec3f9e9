"""Restart policy of one part: a state machine without its own clock, processes or randomness.

```
            started            answers                misses MISSES_MAX probes
  WAITING ----------> STARTING --------> READY <--------------------------------> UNHEALTHY
     ^                  |  |               |              answers again             |
     |                  |  | start_timeout,|                                        |
     |                  |  | first request | restart asked                          |
     |                  |  | fails         v                                        |
     |                  |  +-----------> ENDING <-----------------------------------+
     |        ended     |                  |
     +------------------+------------------+     after restarts_max failures in a row,
                        |                        or where nothing is restarted:  FAILED
```

A part fails when it ends without being asked to, is not ready within `start_timeout_ns`, or does
not answer its first request. Failures count in a row: a part that was ready for `STABLE_NS` starts
the count anew. After the n-th failure in a row the policy waits between half and all of
`min(delay_max, first_delay * 2**(n - 1))`, by chance: parts that fail together do not come back
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from prfaas.units import NS_PER_S

FIRST_DELAY_NS = NS_PER_S
STABLE_NS = 120 * NS_PER_S
MISSES_MAX = 3
"""Probes in a row that a ready part may leave unanswered before it counts as unhealthy."""


class Phase(StrEnum):
    """State of a part."""

    WAITING = "waiting"
    """Not running; it is started at `due_at_ns`."""
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    """It runs and does not answer. It is not restarted for that: a busy engine may answer late."""
    ENDING = "ending"
    """It is stopping, for a restart or for good."""
    FAILED = "failed"
    """It is not started again by itself."""


RUNNING = frozenset({Phase.STARTING, Phase.READY, Phase.UNHEALTHY})


class Instruction(StrEnum):
    """Instruction to the caller."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits of one part's restarts.

    Attributes:
        is_enabled: True if a failed part is restarted.
        start_timeout_ns: Time from its start until it has to be ready.
        restarts_max: Failures in a row after which it is not restarted.
        delay_max_ns: Longest wait before a start.
        first_delay_ns: Longest wait after the first failure in a row.
    """

    is_enabled: bool
    start_timeout_ns: int
    restarts_max: int = 10
    delay_max_ns: int = 60 * NS_PER_S
    first_delay_ns: int = FIRST_DELAY_NS

    def delay_ns(self, failures: int, chance: float) -> int:
        """Wait before the next start.

        Args:
            failures: In a row, at least 1.
            chance: Uniform in [0, 1).
        """
        # A shift by more than 40 bits is beyond any `delay_max_ns`, and would grow without limit.
        longest = min(self.delay_max_ns, self.first_delay_ns << min(failures - 1, 40))
        return round(longest * (0.5 + chance / 2))


class Restarts:
    """State of one part.

    Every time is an instant of one monotonic clock, nanoseconds.

    Args:
        chance: Uniform in [0, 1).
        now_ns: The part is started from here on.
    """

    def __init__(self, policy: RestartPolicy, chance: Callable[[], float], now_ns: int) -> None:
        self.policy = policy
        self.phase = Phase.WAITING
        self.since_ns = now_ns
        self.due_at_ns: int | None = now_ns
        """Time of the next instruction without an event; None for never."""
        self.reason = ""
        """Reason of its last end, as a predicate of the part; "" before the first."""
        self.failures = 0
        """Failures in a row."""
        self.num_restarts = 0
        """Starts after the first one."""
        self.was_ready = False
        self._chance = chance
        self._misses = 0
        self._ready_at_ns: int | None = None
        self._is_asked = False
        self._was_started = False

    def tick(self, now_ns: int) -> Instruction | None:
        """Return what falls due now."""
        if self.due_at_ns is None or now_ns < self.due_at_ns:
            return None
        if self.phase is Phase.WAITING:
            self.due_at_ns = None
            return Instruction.START
        if self.phase is Phase.STARTING:
            seconds = self.policy.start_timeout_ns / NS_PER_S
            return self.start_failed(now_ns, f"was not ready within {seconds:g} s")
        return None

    def started(self, now_ns: int) -> None:
        """The process was started."""
        self.num_restarts += self._was_started
        self._was_started = True
        self._misses = 0
        self._enter(Phase.STARTING, now_ns, now_ns + self.policy.start_timeout_ns)

    def probed(self, now_ns: int, *, answers: bool) -> None:
        """A probe of its health has come back."""
        self._misses = 0 if answers else self._misses + 1
        if answers and self.phase in (Phase.STARTING, Phase.UNHEALTHY):
            self.was_ready = True
            self._ready_at_ns = self._ready_at_ns or now_ns
            self._enter(Phase.READY, now_ns)
        elif self.phase is Phase.READY and self._misses >= MISSES_MAX:
            self._enter(Phase.UNHEALTHY, now_ns)

    def start_failed(self, now_ns: int, reason: str) -> Instruction | None:
        """The process runs and cannot become ready.

        Returns:
            `END` if it is starting.
        """
        if self.phase is not Phase.STARTING:
            return None
        self.reason = reason
        self._enter(Phase.ENDING, now_ns)
        return Instruction.END

    def ended(self, now_ns: int, reason: str) -> None:
        """The process has ended, or could not be started.

        Args:
            reason: What happened, as a predicate of the part. One that was told to stop keeps the
                reason why.
        """
        was_stable = self._ready_at_ns is not None and now_ns - self._ready_at_ns >= STABLE_NS
        self._ready_at_ns = None
        if self._is_asked:
            self._is_asked, self.failures, self.reason = False, 0, "was asked to restart"
            self._enter(Phase.WAITING, now_ns, now_ns)
            return
        if self.phase is not Phase.ENDING:
            self.reason = reason
        self.failures = 1 if was_stable else self.failures + 1
        if not self.policy.is_enabled or self.failures > self.policy.restarts_max:
            self._enter(Phase.FAILED, now_ns)
            return
        delay_ns = self.policy.delay_ns(self.failures, self._chance())
        self._enter(Phase.WAITING, now_ns, now_ns + delay_ns)

    def asked(self, now_ns: int) -> Instruction | None:
        """Handle an operator's restart in any phase.

        Returns:
            `END` if it runs.
        """
        if self.phase in RUNNING:
            self._is_asked = True
            self._enter(Phase.ENDING, now_ns)
            return Instruction.END
        if self.phase is Phase.ENDING:
            self._is_asked = True
        else:
            self.failures = 0
            self._enter(Phase.WAITING, now_ns, now_ns)
        return None

    def _enter(self, phase: Phase, now_ns: int, due_at_ns: int | None = None) -> None:
        self.phase, self.since_ns, self.due_at_ns = phase, now_ns, due_at_ns
