"""The short-term loop: moves a link's threshold a little when one side is pressed.

Each interval the loop looks at the link's use and at both queues. A pressed remote side raises the
threshold, a pressed local side lowers it, and within a dead band nothing moves. One move is
bounded; every reversal halves the step, and only several moves in one direction let it grow again.
Under a constant load the moves therefore shrink to about the smallest step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Limits of the loop.

    Attributes:
        step_ratio_max: Largest move of one interval, as a share of the threshold.
        step_ratio_min: Smaller moves are not made.
        utilisation_high: Share of the link above which the remote side counts as pressed, unless
            waiting is longer at home.
        wait_gap_ns: Difference between both waits below which neither side is pressed.
        span: The threshold stays within the planned one divided and multiplied by this.
        num_moves_to_grow: Moves in one direction after which a step doubles.
    """

    step_ratio_max: float = 0.10
    step_ratio_min: float = 0.01
    utilisation_high: float = 0.90
    wait_gap_ns: int = 1_000_000_000
    span: float = 4.0
    num_moves_to_grow: int = 4


class ThresholdLoop:
    """The threshold of one link.

    Args:
        planned_threshold: t from the planner, tokens, above 0.
        settings: Limits.
    """

    def __init__(
        self,
        planned_threshold: int,
        settings: LoopSettings = LoopSettings(),
    ) -> None:
        self._planned = planned_threshold
        self._settings = settings
        self._threshold = float(planned_threshold)
        self._step = settings.step_ratio_max
        self._direction = 0
        self._num_moves = 0

    @property
    def threshold(self) -> int:
        """Current t, tokens."""
        return round(self._threshold)

    def update(
        self, link_utilisation: float | None, local_wait_ns: int | None, remote_wait_ns: int | None
    ) -> int:
        """One interval has passed.

        Args:
            link_utilisation: Share of the link's capacity that was used, or None.
            local_wait_ns: Predicted wait for local prefill, or None.
            remote_wait_ns: Predicted wait for remote prefill and link, or None.

        Returns:
            The new threshold, tokens; unchanged when a signal is unknown.
        """
        if link_utilisation is None or local_wait_ns is None or remote_wait_ns is None:
            return self.threshold
        direction = self._pressure(link_utilisation, local_wait_ns, remote_wait_ns)
        if direction:
            self._move(direction)
        return self.threshold

    def _pressure(self, utilisation: float, local_wait_ns: int, remote_wait_ns: int) -> int:
        gap = remote_wait_ns - local_wait_ns
        if gap < -self._settings.wait_gap_ns:
            return -1
        # A full link alone is no harm: it has to cost more waiting than there is at home.
        full = utilisation > self._settings.utilisation_high and gap >= 0
        return 1 if full or gap > self._settings.wait_gap_ns else 0

    def _move(self, direction: int) -> None:
        settings = self._settings
        if direction == -self._direction:
            self._step, self._num_moves = self._step / 2, 0
        self._num_moves += 1
        if self._num_moves > settings.num_moves_to_grow:
            self._step, self._num_moves = min(self._step * 2, settings.step_ratio_max), 0
        self._direction = direction
        if self._step < settings.step_ratio_min:
            return
        moved = self._threshold * (1 + direction * self._step)
        self._threshold = min(
            max(moved, self._planned / settings.span), self._planned * settings.span
        )
