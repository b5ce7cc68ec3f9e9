"""Times of a cluster by the length of the work: a fixed cost and a cost of each token, both learnt.

    time
      |            . long           one line, fitted near the length that is asked for
      |     . `
      | . `   short                 only short ones seen: the line leaves a gap (low, high)
      +------------------ work

A short prompt takes most of its time for what has no length: a step, a round trip, loading blocks.
A rate per token learnt from short prompts alone makes long ones look many times too slow.

Observations are kept by octave of a request's own length, the last few of each, as medians. A
tenant who sends one length fills one octave, and outliers move no median until they are half of it.
The line minimises relative errors over the octaves; those that are near in length and in time weigh
more. Neither cost is negative.
"""

from __future__ import annotations

from collections import deque
from math import exp, log
from statistics import median
from typing import NamedTuple

from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.units import NS_PER_S

KEPT_MAX = 8
"""Observations of an octave of lengths."""
LIFETIME_NS = 1800 * NS_PER_S
"""Age beyond which observations count only where there is nothing else."""
HALF_LIFE_NS = 300 * NS_PER_S
"""Age at which an octave weighs half."""
SPAN_MIN = 2.0
"""Ratio of lengths from which on a fixed cost can be told from a cost of each token."""
SLOPE_SHARE_MIN = 1 / 8
"""The cost of a token is at least this share of what the longest ones seen took in all, by token:
beyond them no length is taken to be free."""


class Observed(NamedTuple):
    """A request whose first token came.

    Attributes:
        queued_ns: Nominal work of its instance when it was sent, its own included.
        error: Logarithm of observed by predicted, absolute; None if nothing similar was seen.
        at_ns: When it was observed.
    """

    queued_ns: int
    took_ns: int
    error: float | None
    at_ns: int


class Estimate(NamedTuple):
    """Expected time of work, ns.

    Attributes:
        low_ns: Least that observations allow: the fastest of similar length; without one, what the
            next length seen took, in all or by token.
        high_ns: Most that they allow; `ns` if similar lengths were seen.
        num_near: Observations of similar length.
        error_ratio: Typical factor, at least 1, between a prediction and its observation.
        is_current: False if all observations are beyond their lifetime.
    """

    ns: int
    low_ns: int
    high_ns: int
    num_near: int
    error_ratio: float
    is_current: bool


class _Octave:
    """Recent observations of similar lengths."""

    __slots__ = ("error", "kept", "queued_ns", "seen_at_ns", "took_ns")

    def __init__(self) -> None:
        self.kept: deque[Observed] = deque(maxlen=KEPT_MAX)
        self.queued_ns = self.took_ns = self.error = 0.0
        self.seen_at_ns = 0

    def add(self, found: Observed) -> None:
        kept = self.kept
        while kept and found.at_ns - kept[0].at_ns > LIFETIME_NS:
            kept.popleft()
        kept.append(found)
        self.seen_at_ns = found.at_ns
        self.queued_ns = median(each.queued_ns for each in kept)
        self.took_ns = median(each.took_ns for each in kept)
        errors = [each.error for each in kept if each.error is not None]
        self.error = sum(errors) / len(errors) if errors else 0.0


class LengthTimes:
    """Observed times of one cluster.

    Args:
        settings: Minimum number of observations, their age, and the error that refutes them.
    """

    def __init__(self, settings: CalibrationSettings) -> None:
        self._settings = settings
        self._octaves: dict[int, _Octave] = {}
        self._seen_at_ns = 0
        self.num_samples = 0

    def observe(self, own_ns: int, found: Observed) -> None:
        """Add an observation of a request whose own nominal work is `own_ns`."""
        self._octaves.setdefault(own_ns.bit_length(), _Octave()).add(found)
        self._seen_at_ns = max(self._seen_at_ns, found.at_ns)
        self.num_samples += 1

    def is_fresh(self, now_ns: int) -> bool:
        """Return True if there are enough observations, one of them recent."""
        settings = self._settings
        is_recent = now_ns - self._seen_at_ns <= settings.stale_after_ns
        return is_recent and self.num_samples >= settings.num_min

    def estimate(self, own_ns: int, queued_ns: int, now_ns: int) -> Estimate | None:
        """Estimate the time of a request; None without observations.

        Args:
            queued_ns: Nominal work of its instance, this one's included.
        """
        own = own_ns.bit_length()
        known = {
            place: octave
            for place, octave in self._octaves.items()
            if now_ns - octave.seen_at_ns <= LIFETIME_NS
        }
        is_current = bool(known)
        known = known or self._octaves
        if not known:
            return None
        fixed, slope = _line(known, own, now_ns)
        expected_ns = max(fixed + slope * queued_ns, 1.0)
        nearest = known[min(known, key=lambda place: (abs(place - own), -place))]
        near = [known[place] for place in (own - 1, own, own + 1) if place in known]
        if near and is_current:
            ratio = min(each.took_ns / each.queued_ns for octave in near for each in octave.kept)
            low, high = ratio * queued_ns, expected_ns
        else:
            whole, by_token = nearest.took_ns, nearest.took_ns * queued_ns / nearest.queued_ns
            low = min(whole, by_token) if is_current else 0.0
            high = max(whole, by_token, expected_ns)
        num_near = sum(len(octave.kept) for octave in near) if is_current else 0
        error_ratio = exp(nearest.error)
        return Estimate(
            round(expected_ns), round(low), round(high), num_near, error_ratio, is_current
        )

    def observed(
        self, queued_ns: int, predicted: Estimate | None, sent_at_ns: int, now_ns: int
    ) -> Observed:
        """The observation of a request that was predicted when it was sent."""
        took_ns, error = max(now_ns - sent_at_ns, 1), None
        if predicted is not None and predicted.num_near:
            error = abs(log(took_ns / predicted.ns))
        return Observed(queued_ns, took_ns, error, now_ns)


def _line(known: dict[int, _Octave], own: int, now_ns: int) -> tuple[float, float]:
    """Fixed cost, ns, and slope of the line through the octaves around one of them."""
    one = both = slopes = time = work = 0.0
    for place, octave in known.items():
        age = min(max(now_ns - octave.seen_at_ns, 0), LIFETIME_NS) / HALF_LIFE_NS
        weight = len(octave.kept) * 0.5 ** (abs(place - own) + age)
        per_ns, per_work = 1 / octave.took_ns, octave.queued_ns / octave.took_ns
        one += weight * per_ns * per_ns
        both += weight * per_ns * per_work
        slopes += weight * per_work * per_work
        time += weight * per_ns
        work += weight * per_work
    longest = max(known.values(), key=lambda octave: octave.queued_ns)
    shortest_ns = min(octave.queued_ns for octave in known.values())
    proportional = work / slopes
    if longest.queued_ns < SPAN_MIN * shortest_ns:
        return 0.0, proportional
    determinant = one * slopes - both * both
    if determinant <= 1e-9 * one * slopes:
        return 0.0, proportional
    slope = (one * work - both * time) / determinant
    slope = max(slope, SLOPE_SHARE_MIN * longest.took_ns / longest.queued_ns)
    fixed = (time - slope * both) / one
    return (fixed, slope) if fixed > 0 else (0.0, proportional)
