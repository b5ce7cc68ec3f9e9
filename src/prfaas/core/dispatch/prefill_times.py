"""Expected times of prefills: by the costs of a plan, corrected, or by observation alone.

with a plan       costs of the cluster x the factor of its calibration
without one       nominal work of its tokens, corrected by what is learnt of the cluster
policy observed   as without a plan; first tokens of both paths are observed as well
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prfaas.core.dispatch.types import DispatchSettings, LocalCluster, RemoteCluster
from prfaas.core.routing.calibration import Calibration
from prfaas.core.routing.decision import Path
from prfaas.core.routing.first_tokens import FirstTokens
from prfaas.core.routing.observed_rates import ObservedRates, nominal_ns
from prfaas.core.routing.policies import PolicyName

_LOCAL = Path.LOCAL


class PrefillTimes:
    """Times of prefills by cluster, and what is learnt about them. All times in ns.

    Args:
        local: Name of the PD cluster.
        settings: How requests are routed.
    """

    def __init__(
        self, local: LocalCluster, remotes: Collection[RemoteCluster], settings: DispatchSettings
    ) -> None:
        self._local = local.name
        self._costs = local.costs
        self._remote_costs = {remote.name: remote.costs for remote in remotes}
        self.local_calibration = Calibration(settings.calibration)
        self.remote_calibrations = {
            remote.name: Calibration(settings.calibration) for remote in remotes
        }
        self._rates = ObservedRates() if local.costs is None else None
        self._attention_tokens = settings.attention_tokens
        self.has_plan = self._rates is None
        """True if predictions come from the costs of a plan."""
        self.first_tokens: FirstTokens | None = None
        """Observed first tokens of both paths; None unless the policy is `observed`."""
        if settings.policy is PolicyName.OBSERVED:
            self.first_tokens = FirstTokens(local.name)
        self.observes = not self.has_plan or self.first_tokens is not None
        """True if something is learnt from each prefill that was sent."""

    @property
    def calibrations(self) -> Mapping[tuple[Path, str], Calibration]:
        """Corrections of predictions, by path and by the cluster that prefills."""
        remote = {(Path.REMOTE, n): found for n, found in self.remote_calibrations.items() if n}
        return {(Path.LOCAL, self._local): self.local_calibration, **remote}

    def calibration(self, path: Path, remote: str) -> Calibration:
        """The correction of a path; `remote` is the PrfaaS cluster that was considered."""
        return self.local_calibration if path is _LOCAL else self.remote_calibrations[remote]

    def local_ns(self, num_new_tokens: int, prefix_tokens: int) -> int:
        """Work of a prefill after a cached prefix in the PD cluster, without queue."""
        if self._costs is None:
            return nominal_ns(num_new_tokens, prefix_tokens, self._attention_tokens)
        work_ns = self._costs.local_prefill_ns(num_new_tokens, prefix_tokens)
        return round(work_ns * self.local_calibration.factor)

    def remote_ns(self, cluster: str, num_new_tokens: int, prefix_tokens: int) -> int:
        """Work of a prefill after a cached prefix in a PrfaaS cluster, without queue and link."""
        costs = self._remote_costs[cluster]
        if costs is None:
            return nominal_ns(num_new_tokens, prefix_tokens, self._attention_tokens)
        work_ns = costs.remote_prefill_ns(num_new_tokens, prefix_tokens)
        return round(work_ns * self.remote_calibrations[cluster].factor)

    def queue_ns(self, cluster: str, own_ns: int, work_ns: int, now_ns: int) -> int | None:
        """Expected time of booked work in a cluster, by what was observed; None is unknown.

        Args:
            own_ns: Work of the last request of it.
        """
        if self._rates is None:
            return work_ns
        if not self._rates.has_enough(cluster):
            return None
        found = self._rates.estimate(cluster, own_ns, work_ns, now_ns)
        return None if found is None else found.ns

    # Observation of prefills that were sent

    def sent(self, request_id: int, cluster: str, wait_ns: int, own_ns: int, now_ns: int) -> None:
        """A prefill is sent to a cluster, behind `wait_ns` of work that counts its own."""
        if self._rates is not None:
            self._rates.sent(request_id, cluster, own_ns, wait_ns, now_ns)

    def answered(self, request_id: int, now_ns: int) -> None:
        """A prefill has answered."""
        if self._rates is not None:
            self._rates.answered(request_id, now_ns)

    def came(self, request_id: int, at_ns: int) -> None:
        """Decode of a request could begin, or its first token has come."""
        if self.first_tokens is not None:
            self.first_tokens.came(request_id, at_ns)
        self.answered(request_id, at_ns)

    def drop(self, request_id: int) -> None:
        """Learn nothing from a request: it left the path that it was sent on, or is over."""
        if self._rates is not None:
            self._rates.drop(request_id)
        if self.first_tokens is not None:
            self.first_tokens.drop(request_id)

    def observed_ns(self, request_id: int) -> int | None:
        """Expected duration of a prefill by the rate of its cluster; None while it is unknown."""
        return None if self._rates is None else self._rates.expected_ns(request_id)

    def alone_ns(
        self, cluster: str, num_new_tokens: int, prefix_tokens: int, now_ns: int
    ) -> int | None:
        """Expected duration of a prefill in a cluster without queue; None is unknown."""
        is_local = cluster not in self._remote_costs
        own_ns = (
            self.local_ns(num_new_tokens, prefix_tokens)
            if is_local
            else self.remote_ns(cluster, num_new_tokens, prefix_tokens)
        )
        return self.queue_ns(cluster, own_ns, own_ns, now_ns)

    def with_queue_ns(
        self, wait_ns: int, num_new_tokens: int, prefix_tokens: int, now_ns: int
    ) -> int | None:
        """Expected duration of a prefill in the PD cluster behind a queue; None is unknown."""
        own_ns = self.local_ns(num_new_tokens, prefix_tokens)
        return self.queue_ns(self._local, own_ns, wait_ns + own_ns, now_ns)
