"""Observed times to the first token, by the cluster that prefills: routing without a plan.

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

from typing import NamedTuple

from prfaas.core.routing.length_times import Estimate
from prfaas.core.routing.observed_rates import PACE, ObservedRates

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
