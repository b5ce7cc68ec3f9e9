"""Order of admission between classes of service.

While requests of a class are refused, those of lower classes are admitted only up to a part of
their target: the queue becomes shorter, until the higher class is in time again.
"""

from __future__ import annotations

from prfaas.units import NS_PER_S

WINDOW_NS = 60 * NS_PER_S
"""Time for which a refusal shortens the queue of lower classes."""
LEAST_RATIO = 0.4
"""Part of the target that is left to them."""


class Priorities:
    """The last refusal of each priority."""

    def __init__(self) -> None:
        self._refused_at_ns: dict[int, int] = {}

    def limit(self, priority: int, target_ns: int, now_ns: int) -> int:
        """Part of the target up to which a request is admitted, ns.

        Args:
            target_ns: Predicted time to first token that is the limit without higher classes.
        """
        for other, at_ns in self._refused_at_ns.items():
            if other > priority and now_ns - at_ns <= WINDOW_NS:
                return round(target_ns * LEAST_RATIO)
        return target_ns

    def refused(self, priority: int, now_ns: int) -> None:
        """A request of this priority was refused."""
        self._refused_at_ns[priority] = now_ns
