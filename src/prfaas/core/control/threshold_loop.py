"""The short-term loop: moves a link's threshold when one side stays pressed.

A backlog is the sum over time of what a threshold did wrong, so it continues growing while the
threshold already moves back: a loop that follows it swings for ever, however small its steps. Four
rules keep this one still.

- It follows where the gap between both waits will be, not where it is: gap + lead x trend. A
  backlog that is falling calls for nothing more.
- It moves only when the pressure has lasted longer than a signal takes to show a move.
- After a turn it goes at most half as far back as it came. So a swing shrinks by half at every
  turn, whatever the system does, and below the smallest step the loop stands still.
- Pressure that lasts at such an end lets it creep on, and a long time without any sets it free:
  what comes then is another load.

Stale signals hold it where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Limits of the loop. Distances are in ln(tokens): 0.1 is about 10 %.

    Attributes:
        step_max: Largest move of one interval.
        step_min: Smaller moves are not made.
        reach_max: Farthest that one run goes at full step.
        span: The threshold stays within the planned one divided and multiplied by this.
        utilisation_high: Share of the link above which the remote side counts as pressed, unless
            the local wait is longer.
        wait_gap_ns: Difference between both waits below which neither side is pressed.
        wait_gap_ratio: The same as a share of the shorter wait: where both sides are late, no
            threshold helps.
        lead_ns: How far ahead the gap is predicted.
        trend_weight: Weight of the newest interval in the trend, in (0, 1].
        num_to_move: Intervals that a pressure has to last before the first move.
        num_to_extend: Intervals of pressure at the end of the reach after which it grows by two
            smallest steps.
        num_to_forget: Intervals without pressure after which the reach is free again.
    """

    step_max: float = 0.05
    step_min: float = 0.01
    reach_max: float = 0.20
    span: float = 1.5
    utilisation_high: float = 0.95
    wait_gap_ns: int = 2 * NS_PER_S
    wait_gap_ratio: float = 0.5
    lead_ns: int = 60 * NS_PER_S
    trend_weight: float = 0.2
    num_to_move: int = 6
    num_to_extend: int = 24
    num_to_forget: int = 60


@dataclass(frozen=True, slots=True)
class Pressures:
    """Inputs of the loop; None is unknown or too old.

    Attributes:
        link_utilisation: Share of the link's capacity that was used.
        local_wait_ns: Predicted wait for local prefill.
        remote_wait_ns: Predicted wait for remote prefill and link.
    """

    link_utilisation: float | None
    local_wait_ns: int | None
    remote_wait_ns: int | None


class ThresholdLoop:
    """The threshold of one link.

    Args:
        planned_threshold: t from the planner, tokens, above 0.
    """

    def __init__(self, planned_threshold: int, settings: LoopSettings = LoopSettings()) -> None:
        self._settings = settings
        self._direction, self._travelled, self._num_held = 0, 0.0, 0
        self.replan(planned_threshold)

    def replan(self, planned_threshold: int) -> None:
        """Start over from another planned threshold, tokens, above 0."""
        self._planned = log(planned_threshold)
        self._position = self._planned
        self._num_pressed, self._num_quiet, self._pressed = 0, 0, 0
        self._forget()
        self._seen: tuple[int, int] | None = None
        self._trend = 0.0

    @property
    def threshold(self) -> int:
        """Current t, tokens."""
        return max(1, round(exp(self._position)))

    def update(self, now_ns: int, pressures: Pressures) -> int:
        """One interval has passed.

        Returns:
            The new threshold, tokens; unchanged when a signal is unknown.
        """
        use, here, there = (
            pressures.link_utilisation,
            pressures.local_wait_ns,
            pressures.remote_wait_ns,
        )
        if use is None or here is None or there is None:
            self._seen, self._num_pressed = None, 0
            return self.threshold
        direction = self._pressure(now_ns, use, here, there)
        if self._lasts(direction):
            self._move(direction)
        return self.threshold

    def _pressure(self, now_ns: int, utilisation: float, here_ns: int, there_ns: int) -> int:
        """1 when the remote side will be pressed, -1 when the local one will be, else 0."""
        settings, gap_ns = self._settings, there_ns - here_ns
        limit = max(settings.wait_gap_ns, settings.wait_gap_ratio * min(here_ns, there_ns))
        ahead = gap_ns + settings.lead_ns * self._trend_to(now_ns, gap_ns)
        # Both have to agree: a trend without a gap is noise, and a gap that closes will be gone.
        if gap_ns < -limit and ahead < -limit:
            return -1
        # A full link alone is no reason: its wait has to exceed the local one.
        full = utilisation > settings.utilisation_high and gap_ns > 0
        return 1 if (full or gap_ns > limit) and ahead > limit else 0

    def _trend_to(self, now_ns: int, gap_ns: int) -> float:
        """Change of the gap, ns per ns, smoothed over the last intervals."""
        before, self._seen = self._seen, (now_ns, gap_ns)
        if before is None or now_ns <= before[0]:
            self._trend = 0.0
        else:
            newest = (gap_ns - before[1]) / (now_ns - before[0])
            self._trend += self._settings.trend_weight * (newest - self._trend)
        return self._trend

    def _lasts(self, direction: int) -> bool:
        """Return True if a pressure has lasted long enough for a move."""
        if not direction:
            self._num_pressed = 0
            self._num_quiet += 1
            if self._num_quiet >= self._settings.num_to_forget:
                self._forget()
            return False
        self._num_quiet = 0
        self._num_pressed = self._num_pressed + 1 if direction == self._pressed else 1
        self._pressed = direction
        return self._num_pressed >= self._settings.num_to_move

    def _move(self, direction: int) -> None:
        settings = self._settings
        if direction == -self._direction:
            # What was travelled bounds the way back; a run that was itself cut short counts as cut.
            self._reach, self._travelled, self._num_held = self._travelled / 2, 0.0, 0
        self._direction = direction
        step = min(settings.step_max, self._reach - self._travelled)
        if step < settings.step_min:
            self._wait_for_reach()
            return
        edge = log(settings.span)
        low, high = self._planned - edge, self._planned + edge
        moved = min(max(self._position + direction * step, low), high)
        self._travelled += abs(moved - self._position)
        self._position = moved

    def _wait_for_reach(self) -> None:
        self._num_held += 1
        if self._num_held >= self._settings.num_to_extend:
            self._reach, self._num_held = self._travelled + 2 * self._settings.step_min, 0

    def _forget(self) -> None:
        """Reset after a change of the load, to which earlier swings do not apply."""
        self._direction, self._travelled, self._num_held = 0, 0.0, 0
        self._reach = self._settings.reach_max
