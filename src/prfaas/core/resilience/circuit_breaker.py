"""Circuit breakers: who keeps failing is left alone for a while, then tried with one request.

    CLOSED ──failures in a row, or most of many──► OPEN ──its time is over──► HALF_OPEN
      ▲                                             ▲                             │
      └──────────────── the probe succeeds ─────────┼───── the probe fails ───────┘

Each opening that follows a failed probe lasts twice as long as the one before, up to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prfaas.core.invariants import hold
from prfaas.units import NS_PER_S


class BreakerState(StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    """All requests pass."""
    HALF_OPEN = "half_open"
    """One request at a time."""
    OPEN = "open"
    """No request passes."""


_HALF_OPEN = BreakerState.HALF_OPEN


class BreakerOutcome(StrEnum):
    """Result of a request for the breaker of an engine or a link."""

    GOOD = "good"
    FAILED = "failed"
    NOTHING = "nothing"
    """It ended for reasons of its own."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Settings of a breaker: conditions and duration of its opening."""

    failures_max: int = 5
    """Failures in a row that open it."""
    failed_ratio: float = 0.5
    """Share of failures in a window that opens it."""
    outcomes_min: int = 20
    """Outcomes that a window needs for its share to count."""
    window_ns: int = 10 * NS_PER_S
    open_ns: int = NS_PER_S
    """Time that it stays open the first time."""
    open_max_ns: int = 30 * NS_PER_S
    """Longest that it stays open."""


class Breaker:
    """The breaker of one instance or one link."""

    def __init__(self, settings: BreakerSettings = BreakerSettings()) -> None:
        self._settings = settings
        self.state = BreakerState.CLOSED
        self._open_ns = settings.open_ns
        self._changes_at_ns = 0
        self._probing_since_ns: int | None = None
        self._in_a_row = 0
        self._window_ends_at_ns, self._num_outcomes, self._num_failed = 0, 0, 0

    def allows(self, now_ns: int) -> bool:
        """Return True if a request may be sent now; an opening that is over ends here."""
        if self.state is BreakerState.OPEN and now_ns >= self._changes_at_ns:
            self.state, self._probing_since_ns = BreakerState.HALF_OPEN, None
        if self.state is not BreakerState.HALF_OPEN:
            return self.state is BreakerState.CLOSED
        return not self._is_probing(now_ns)

    def began(self, now_ns: int) -> None:
        """A request was sent."""
        if self.state is BreakerState.HALF_OPEN and not self._is_probing(now_ns):
            self._probing_since_ns = now_ns

    def succeeded(self, now_ns: int) -> None:
        """A request came through."""
        if self.state is _HALF_OPEN:
            self.state, self._open_ns = BreakerState.CLOSED, self._settings.open_ns
            self._num_outcomes = self._num_failed = 0
        self._in_a_row = 0
        if now_ns < self._window_ends_at_ns:
            self._num_outcomes += 1
        else:
            self._count(now_ns, failed=False)

    def failed(self, now_ns: int) -> None:
        """A request failed, and it was not the request's fault."""
        if self.state is BreakerState.HALF_OPEN:
            self._open_ns = min(2 * self._open_ns, self._settings.open_max_ns)
            self._open(now_ns)
            return
        self._in_a_row += 1
        self._count(now_ns, failed=True)
        if self.state is BreakerState.CLOSED and self._is_too_much():
            self._open(now_ns)

    def gave_up(self) -> None:
        """A request ended without telling anything, its client having left: probe again."""
        self._probing_since_ns = None

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        least_ns, most_ns = self._settings.open_ns, self._settings.open_max_ns
        hold(
            failures_are_among_the_outcomes=0 <= self._num_failed <= self._num_outcomes,
            it_opens_within_its_times=least_ns <= self._open_ns <= most_ns,
        )

    def _is_probing(self, now_ns: int) -> bool:
        """Return True if a probe is under way; one of which nothing is heard is forgotten in the
        end."""
        since = self._probing_since_ns
        return since is not None and now_ns - since < self._settings.open_max_ns

    def _is_too_much(self) -> bool:
        settings = self._settings
        many = self._num_outcomes >= settings.outcomes_min
        mostly = self._num_failed >= settings.failed_ratio * self._num_outcomes
        return self._in_a_row >= settings.failures_max or (many and mostly)

    def _open(self, now_ns: int) -> None:
        self.state, self._changes_at_ns = BreakerState.OPEN, now_ns + self._open_ns
        self._in_a_row = self._num_outcomes = self._num_failed = 0

    def _count(self, now_ns: int, *, failed: bool) -> None:
        if now_ns >= self._window_ends_at_ns:
            self._window_ends_at_ns = now_ns + self._settings.window_ns
            self._num_outcomes = self._num_failed = 0
        self._num_outcomes += 1
        self._num_failed += failed
