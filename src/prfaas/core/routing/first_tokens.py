"""Observed times to the first token, by the cluster that prefills: routing without a plan.

    request ──► tokens queued and its own, at either instance ──► time per token of the cluster
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
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from prfaas.core.routing.observed_rates import PACE, Paces

UNSEEN_RATIO = 4.0
"""Time of a local prefill against one away, while too few were observed at home. PrfaaS clusters
have the faster accelerators; even those are slower when this many prompts queue there."""
MARGIN_RATIO, MARGIN_NS = 0.05, 20_000_000
"""Gain that is taken for noise, as a share of the remote path's time and as a duration: the
threshold stays. A prompt that was kept at home by mistake corrects the rate of its cluster."""


class Compared(NamedTuple):
    """Expected times to the first token, ns."""

    local_ns: int
    remote_ns: int


class FirstTokens:
    """Observes first tokens; compares both paths of a request.

    Args:
        home: Name of the PD cluster.
    """

    def __init__(self, home: str) -> None:
        self._home = home
        # From the first sample on: what was expected before it was no expectation.
        self._paces = Paces(replace(PACE, num_min=1))

    def sent(self, request_id: int, cluster: str, queued_ns: int, now_ns: int) -> None:
        """A prefill is sent to a cluster; `queued_ns` is its instance's nominal work with it."""
        self._paces.sent(request_id, cluster, queued_ns, now_ns)

    def came(self, request_id: int, at_ns: int) -> None:
        """The first token of a request came."""
        self._paces.answered(request_id, at_ns)

    def drop(self, request_id: int) -> None:
        """Its TTFT does not measure its original path."""
        self._paces.drop(request_id)

    def sooner_at_home(
        self,
        cluster: str,
        *,
        local_ns: int,
        remote_ns: int,
        own_ns: int,
        num_decoding: int,
        now_ns: int,
    ) -> Compared | None:
        """Compare both paths of a request that would be offloaded.

        Args:
            cluster: The PrfaaS cluster.
            local_ns: Nominal work at the PD instance, this request's included.
            remote_ns: The same at the PrfaaS instance.
            own_ns: Nominal local work of this request.
            num_decoding: Requests that the PD instance decodes.
            now_ns: Time.

        Returns:
            Both times if the prompt is to be prefilled locally, delays of others left out; None if
            not.
        """
        away_ns = self._paces.proven_ns(cluster, remote_ns, now_ns)
        if away_ns is None:
            return None
        seen = self._paces.proven_ns(self._home, local_ns, now_ns)
        unseen_ns = round(away_ns * UNSEEN_RATIO * local_ns / max(remote_ns, 1))
        here_ns = unseen_ns if seen is None else seen
        delay_ns = num_decoding * here_ns * own_ns / max(local_ns, 1)
        margin_ns = max(MARGIN_NS, MARGIN_RATIO * away_ns)
        if here_ns + delay_ns + margin_ns >= away_ns:
            return None
        return Compared(here_ns, away_ns)
