"""Rule to abandon a late remote path and prefill on the decode engine.

A remote path is late when it is going to end well after its own prediction, or after the deadline.
It is left when the local path, begun now, is going to be sooner. What has arrived by then stays.

    to come    what was predicted, less the time that has passed; once that is over, as long again
               as it is overdue. At least what the link needs for the bytes it still has to carry.

The second rule is that of the ski rental problem: whoever waits for as long as the other way takes,
and then takes it, needs at most twice the time of who knew before.
"""

from __future__ import annotations

from prfaas.records import MutableRecord
from prfaas.units import NS_PER_S

LATE_RATIO = 1.5
"""By how much a prediction has to be missed."""
LATE_NS_MIN = 50_000_000
"""And by how long: predictions of short times are no better than that."""
SOONER_RATIO = 1.1
"""By how much the local path has to be sooner."""

PATIENCE_RATIO = 4
"""Times its expected duration after which a prefill that has not answered has stalled."""
PATIENCE_NS_MIN = 2 * NS_PER_S
"""And at least this long."""


class RemotePath(MutableRecord):
    """A remote path that is under way. Instants and durations in nanoseconds."""

    started_at_ns: int
    """Time when it was predicted."""
    predicted_ns: int
    """Time from there to the first token."""
    deadline_ns: int | None = None
    """Instant at which the first token should be there; None without a target."""
    link_bytes: float | None = None
    """What the link has to carry until the end of this request's blocks; None is unknown."""
    _looked_at_ns: int | None = None

    def to_come_ns(self, now_ns: int, bits_per_s: float | None) -> int:
        """Predicted time from now to the first token.

        Args:
            now_ns: Time; not before that of the last call.
            bits_per_s: What the link carries; None is unknown.
        """
        left_ns = abs(self.started_at_ns + self.predicted_ns - now_ns)
        return max(left_ns, self._link_ns(now_ns, bits_per_s))

    def is_late(self, now_ns: int, to_come_ns: int) -> bool:
        """Return True if it misses its prediction by much, or its deadline."""
        at_ns = now_ns + to_come_ns
        if self.deadline_ns is not None and at_ns > self.deadline_ns:
            return True
        return at_ns > self.started_at_ns + usual_ns(self.predicted_ns)

    def _link_ns(self, now_ns: int, bits_per_s: float | None) -> int:
        """Time for what is left to carry, at the rate of the moment."""
        if self.link_bytes is None or bits_per_s is None:
            return 0
        since_ns = now_ns - (self._looked_at_ns or self.started_at_ns)
        self._looked_at_ns = now_ns
        bytes_per_ns = max(bits_per_s, 1.0) / 8 / NS_PER_S
        self.link_bytes = max(0.0, self.link_bytes - since_ns * bytes_per_ns)
        return round(self.link_bytes / bytes_per_ns)


def leaves(path: RemotePath, now_ns: int, to_come_ns: int, local_ns: int) -> bool:
    """Return True if a late path is left for one that takes `local_ns` from now."""
    if not path.is_late(now_ns, to_come_ns):
        return False
    if path.deadline_ns is not None and now_ns + local_ns <= path.deadline_ns < now_ns + to_come_ns:
        return True
    return local_ns * SOONER_RATIO < to_come_ns


def usual_ns(predicted_ns: int) -> float:
    """Time up to which something that was predicted is not late, ns."""
    return max(predicted_ns * LATE_RATIO, predicted_ns + LATE_NS_MIN)


def patience_ns(expected_ns: int) -> int:
    """Time after which a prefill counts as stalled, ns, given its expected duration."""
    return max(PATIENCE_RATIO * expected_ns, PATIENCE_NS_MIN)
