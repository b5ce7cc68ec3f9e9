"""Observed prefill times, for deployments without a plan to predict from.

Work is counted in a nominal time per token, and more where a token attends to a long context; the
fixed cost and the cost of each token are learnt by cluster (`length_times`). The estimate detects a
prefill that has stalled; `first_tokens` routes by it.
"""

from __future__ import annotations

from typing import NamedTuple

from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.length_times import Estimate, LengthTimes

NOMINAL_NS_PER_TOKEN = 100_000
"""Orders instances by their load without profiles: a token without attention."""
PACE = CalibrationSettings()
"""Minimum number of observations, their age, and the error that refutes them."""


def nominal_ns(num_new_tokens: int, prefix_tokens: int, attention_tokens: int) -> int:
    """Nominal work of a prefill after a cached prefix.

    Args:
        prefix_tokens: Tokens that they attend to beside each other.
        attention_tokens: Context at which attention costs a token as much as all else; 0 is
            unknown, and counts tokens alone.
    """
    work = num_new_tokens * NOMINAL_NS_PER_TOKEN
    if attention_tokens:
        work += work * (2 * prefix_tokens + num_new_tokens) // (2 * attention_tokens)
    return work


class _Sent(NamedTuple):
    """A prefill without an answer; `expected` is of the moment at which it was sent."""

    times: LengthTimes
    own_ns: int
    queued_ns: int
    expected: Estimate | None
    at_ns: int


class ObservedRates:
    """Times of clusters, and prefills that were sent to them and have not answered."""

    def __init__(self) -> None:
        self._by_cluster: dict[str, LengthTimes] = {}
        self._open: dict[int, _Sent] = {}

    def sent(self, request_id: int, cluster: str, own_ns: int, queued_ns: int, now_ns: int) -> None:
        """A prefill is sent to a cluster.

        Args:
            own_ns: Its own nominal work.
            queued_ns: Nominal work of its instance, its own included.
        """
        times = self._by_cluster.setdefault(cluster, LengthTimes(PACE))
        own_ns = max(own_ns, 1)
        queued_ns = max(queued_ns, own_ns)
        expected = times.estimate(own_ns, queued_ns, now_ns)
        self._open[request_id] = _Sent(times, own_ns, queued_ns, expected, now_ns)

    def answered(self, request_id: int, now_ns: int) -> None:
        """A prefill has answered: its cluster's times are learnt."""
        found = self._open.pop(request_id, None)
        if found is not None:
            times = found.times
            seen = times.observed(found.queued_ns, found.expected, found.at_ns, now_ns)
            times.observe(found.own_ns, seen)

    def drop(self, request_id: int) -> None:
        """Discard a prefill without an observation."""
        self._open.pop(request_id, None)

    def expected_ns(self, request_id: int) -> int | None:
        """Expected duration of a prefill that has not answered, ns; None while nothing is known."""
        found = self._open.get(request_id)
        if found is None or found.expected is None or found.times.num_samples < PACE.num_min:
            return None
        return found.expected.ns

    def estimate(self, cluster: str, own_ns: int, queued_ns: int, now_ns: int) -> Estimate | None:
        """Expected duration of a prefill behind a queue; None while nothing is known."""
        times = self._by_cluster.get(cluster)
        return None if times is None else times.estimate(max(own_ns, 1), queued_ns, now_ns)

    def has_enough(self, cluster: str) -> bool:
        """Return True if enough of a cluster was observed."""
        times = self._by_cluster.get(cluster)
        return times is not None and times.num_samples >= PACE.num_min

    def proven(self, cluster: str, own_ns: int, queued_ns: int, now_ns: int) -> Estimate | None:
        """Like `estimate`; also None while observations are few, old or inconsistent."""
        times = self._by_cluster.get(cluster)
        if times is None or not times.is_fresh(now_ns):
            return None
        found = times.estimate(max(own_ns, 1), queued_ns, now_ns)
        return found if found is not None and found.error_ratio <= PACE.error_max else None
