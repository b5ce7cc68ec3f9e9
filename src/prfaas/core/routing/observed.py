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

Observed prefill times, for deployments without a plan to predict from.

Work is counted in a nominal time per token, and more where a token attends to a long context; the
fixed cost and the cost of each token are learnt by cluster (`length_times`). The estimate detects a
prefill that has stalled; `first_tokens` routes by it.

Observed times to the first token, by the cluster that prefills: routing without a plan.

    request ──► tokens queued and its own, at either instance ──► expected time of the cluster
                                                                      ▲
    first token of a stream ──────────────────────────────────────────┘

The time to the first token counts all that a path takes: the queue, prefill, the link, loading the
blocks. Where offloading only adds work, as between two engines on the same cores, the remote path
shows as the slower one, and a prompt stays local although it is above the threshold. A local
prefill also delays the requests that its engine decodes; that delay is counted once for each of
them.

Nothing is overruled without enough recent first tokens of the remote path, which only requests that
take it bring: after `CalibrationSettings.stale_after_ns` without one, the threshold alone decides
until there is one again. A PD cluster of which too little was seen counts as slow.

Where only short prompts are prefilled locally, nothing shows how long a long one would take. So a
long prompt is *tried* locally now and then: while nothing is prefilled or decoded there, if what
was seen allows that it is sooner, and not much later at worst. A few trials of a length are enough;
one that was slower ends them for `LIFETIME_NS`.
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
    """A request whose first token came."""

    queued_ns: int
    """Nominal work of its instance when it was sent, its own included."""
    took_ns: int
    error: float | None
    """Logarithm of observed by predicted, absolute; None if nothing similar was seen."""
    at_ns: int
    """Time when it was observed."""


class Estimate(NamedTuple):
    """Expected time of work, ns."""

    ns: int
    low_ns: int
    """Least that observations allow: the fastest of similar length; without one, what the next
    length seen took, in all or by token."""
    high_ns: int
    """Most that they allow; `ns` if similar lengths were seen."""
    num_near: int
    """Observations of similar length."""
    error_ratio: float
    """Typical factor, at least 1, between a prediction and its observation."""
    is_current: bool
    """False if all observations are beyond their lifetime."""


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


UNSEEN_RATIO = 4.0
"""Time of a local prefill against a remote one, while too few local ones were observed. PrfaaS
clusters have the faster accelerators; even those are slower when this many prompts queue there."""
MARGIN_RATIO, MARGIN_NS = 0.05, 20_000_000
"""Gain that is taken for noise, as a share of the remote path's time and as a duration: the
threshold stays. A prompt that was kept local by mistake corrects the estimate of its cluster."""
TRIALS = 3
"""Local prefills of similar length after which such a length counts as seen."""
TRIAL_EVERY = PACE.num_min
"""Remote first tokens between two trials."""
TRIAL_RATIO_MAX = 8.0
"""By how much a trial may be slower than the remote path, by what was seen at worst."""


class ComparedPaths(NamedTuple):
    """Expected times to the first token, ns; `is_trial`: the prompt is prefilled locally to see."""

    local_ns: int
    remote_ns: int
    is_trial: bool = False


class NominalWork(NamedTuple):
    """Nominal work of a request on a path: its own, and of its instance with it, ns."""

    own_ns: int
    queued_ns: int


class FirstTokens:
    """Observes first tokens; compares both paths of a request.

    Args:
        local: Name of the PD cluster.
    """

    def __init__(self, local: str) -> None:
        self._local, self._rates = local, ObservedRates()
        self._num_since_trial = 0

    def sent(
        self,
        request_id: int,
        cluster: str,
        work: NominalWork,
        now_ns: int,
        *,
        is_trial: bool = False,
    ) -> None:
        """A prefill is sent to a cluster."""
        self._num_since_trial = 0 if is_trial else self._num_since_trial + (cluster != self._local)
        self._rates.sent(request_id, cluster, *work, now_ns)

    def came(self, request_id: int, at_ns: int) -> None:
        """The first token of a request came."""
        self._rates.answered(request_id, at_ns)

    def drop(self, request_id: int) -> None:
        """Its TTFT does not measure its original path."""
        self._rates.drop(request_id)

    def sooner_at_local(
        self, cluster: str, local: NominalWork, remote: NominalWork, num_decoding: int, now_ns: int
    ) -> ComparedPaths | None:
        """Compare both paths of a request that would be offloaded.

        Args:
            local: Its work at the PD instance.
            remote: Its work at the PrfaaS instance.
            num_decoding: Requests that the PD instance decodes.

        Returns:
            Both times if the prompt is to be prefilled locally, delays of others left out; None if
            not.
        """
        seen_remote = self._rates.proven(cluster, *remote, now_ns)
        if seen_remote is None:
            return None
        own_ns, queued_ns = local
        is_idle = own_ns == queued_ns and not num_decoding
        seen = self._rates.estimate(self._local, *local, now_ns)
        known = seen if seen is not None and self._is_known(seen) else None
        here_ns = round(seen_remote.ns * UNSEEN_RATIO * queued_ns / max(remote.queued_ns, 1))
        if known is not None:
            # Nobody queues for what no prompt of this length has shown.
            here_ns = known.ns if is_idle or known.num_near else known.high_ns
        delay_ns = num_decoding * here_ns * own_ns / max(queued_ns, 1)
        margin_ns = max(MARGIN_NS, MARGIN_RATIO * seen_remote.ns)
        if here_ns + delay_ns + margin_ns < seen_remote.ns:
            return ComparedPaths(here_ns, seen_remote.ns)
        if is_idle and self._is_worth_a_trial(seen, here_ns, seen_remote.ns - margin_ns):
            return ComparedPaths(here_ns, seen_remote.ns, is_trial=True)
        return None

    def _is_known(self, seen: Estimate) -> bool:
        """Return True if enough was seen of the PD cluster, without contradictions."""
        is_enough = seen.num_near >= TRIALS or self._rates.has_enough(self._local)
        return is_enough and seen.is_current and seen.error_ratio <= PACE.error_max

    def _is_worth_a_trial(self, seen: Estimate | None, here_ns: int, limit_ns: float) -> bool:
        """Return True if a local prefill would show whether it is sooner, and costs little."""
        if self._num_since_trial < TRIAL_EVERY:
            return False
        if seen is None:
            return here_ns <= TRIAL_RATIO_MAX * limit_ns
        is_open = seen.num_near < TRIALS and seen.low_ns < limit_ns
        return is_open and seen.high_ns <= TRIAL_RATIO_MAX * limit_ns
