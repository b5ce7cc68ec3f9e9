"""Expected times of prefills: by the costs of a plan, corrected, or by observation alone.

with a plan       costs of the cluster x the factor of its calibration
without one       nominal work of its tokens, corrected by what is learnt of the cluster
policy observed   as without a plan; first tokens of both paths are observed as well

Instances that only decode: how many requests each has, and how long one waits for decode: behind
those that wait already and those in transit. How many decode at once is seen while requests queue,
and how long one takes as it ends. Waits of the past alone would come too late: with ten seconds of
prefill under way, a queue that is seen now belongs to requests that were routed ten seconds ago.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from prfaas.core.dispatch.instance_load import InstanceLoad
from prfaas.core.dispatch.types import (
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
    Routed,
)
from prfaas.core.invariants import hold
from prfaas.core.routing.calibration import Calibration
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.observed import FirstTokens, NominalWork, ObservedRates, nominal_ns
from prfaas.core.routing.policies import PolicyName
from prfaas.core.routing.predictions import NO_WAIT, DecodeWait
from prfaas.units import NS_PER_S

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

    def work_ns(self, routed: Routed) -> int:
        """Work of a prefill as routed, without queue and link."""
        hit = routed.hit_tokens
        new = routed.facts.num_prompt_tokens - hit
        if routed.decision.path is _LOCAL:
            return self.local_ns(new, hit)
        return self.remote_ns(routed.cluster, new, hit)

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

    def sent(self, request_id: int, routed: Routed, book: InstanceLoad, now_ns: int) -> None:
        """A prefill is sent to an instance, whose queue has it already."""
        name, cluster, own_ns = routed.prefill, routed.cluster, self.work_ns(routed)
        if self._rates is not None:
            wait_ns = book.wait_ns(name, now_ns) or 0
            self._rates.sent(request_id, cluster, own_ns, wait_ns, now_ns)
        if self.first_tokens is not None and not routed.pulled_from:
            work = NominalWork(own_ns, book.pending_ns(name))
            is_trial = routed.decision.reason is Reason.TRIED_LOCAL
            self.first_tokens.sent(request_id, cluster, work, now_ns, is_trial=is_trial)

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


QUEUED_NS = NS_PER_S // 5
"""A request that waited longer was in a queue; less is a step of the batch, or a round trip."""
_WEIGHT = 0.02
"""Weight of the newest duration in their mean and variation."""
_GROWTH_MAX, _FADING = 3, 0.95
"""A prediction is at most so many times the longest recent wait, which fades with every request: a
delay that only looks like a queue, such as loading blocks, cannot become a long one."""


class DecodeBook:
    """Spreads requests over instances by how many each has: counts, and the least of them.

    Choosing takes O(different counts) comparisons, and as many for each pool if that is left open.
    """

    def __init__(self, members: Sequence[ClusterMember]) -> None:
        self._pool_of = {member.name: member.pool for member in members}
        self._counts = dict.fromkeys(self._pool_of, 0)
        self._ready = dict.fromkeys(self._pool_of, True)
        self._levels: dict[str, dict[int, list[str]]] = {}
        """Names of the ready instances of each pool, in order, by their count."""
        for member in members:
            insort(self._levels.setdefault(member.pool, {}).setdefault(0, []), member.name)

    def add(self, member: ClusterMember) -> None:
        """Add an instance, which is not ready."""
        self._pool_of[member.name] = member.pool
        self._counts[member.name], self._ready[member.name] = 0, False
        self._levels.setdefault(member.pool, {})

    def remove(self, name: str) -> None:
        """Forget an instance that has no requests."""
        self.set_ready(name, ready=False)
        pool = self._pool_of.pop(name)
        del self._counts[name], self._ready[name]
        if pool not in self._pool_of.values():
            del self._levels[pool]

    def choose(self, avoid: str = "", pool: str = "") -> str | None:
        """The ready instance with the fewest requests gets one more; None without any.

        Args:
            avoid: Instance that was tried already.
            pool: Others are only asked if no instance of this pool is ready; "" leaves it open.
        """
        first = self._first(pool, avoid) if pool in self._levels else None
        if first is None:
            found = (self._first(other, avoid) for other in self._levels)
            first = min((each for each in found if each is not None), default=None)
        if first is None:
            return None
        self._change(first[1], 1)
        return first[1]

    def least(self, avoid: str = "") -> dict[str, int]:
        """Requests of the least loaded instance of each pool that has a ready one."""
        found = {pool: self._first(pool, avoid) for pool in self._levels}
        return {pool: first[0] for pool, first in found.items() if first is not None}

    def leave(self, name: str) -> None:
        """An instance has one request less."""
        self._change(name, -1)

    def set_ready(self, name: str, *, ready: bool) -> None:
        """An instance became healthy, or stopped being so."""
        if ready != self._ready[name]:
            self._ready[name], count = ready, self._counts[name]
            levels = self._levels[self._pool_of[name]]
            if ready:
                insort(levels.setdefault(count, []), name)
            else:
                _take(levels, count, name)

    def num_on(self, name: str) -> int:
        """Requests assigned to an instance and not left."""
        return self._counts.get(name, 0)

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        levels: dict[str, dict[int, list[str]]] = {pool: {} for pool in self._levels}
        for name in sorted(name for name, is_ready in self._ready.items() if is_ready):
            levels[self._pool_of[name]].setdefault(self._counts[name], []).append(name)
        hold(
            no_count_is_negative=all(count >= 0 for count in self._counts.values()),
            the_levels_have_the_ready_ones=self._levels == levels,
        )

    def _first(self, pool: str, avoid: str) -> tuple[int, str] | None:
        """Count and name of the least loaded ready instance of a pool; None without any."""
        levels = self._levels[pool]
        for count in sorted(levels):
            for name in levels[count]:
                if name != avoid:
                    return count, name
        return None

    def _change(self, name: str, by: int) -> None:
        count = self._counts[name]
        self._counts[name] = count + by
        if self._ready[name]:
            levels = self._levels[self._pool_of[name]]
            _take(levels, count, name)
            insort(levels.setdefault(count + by, []), name)


def _take(levels: dict[int, list[str]], count: int, name: str) -> None:
    """Take an instance out of the level of its count."""
    level = levels[count]
    level.pop(bisect_left(level, name))
    if not level:
        del levels[count]


class DecodeFlow:
    """Requests in transit to decode, those that wait for it, and those that decode.

    Args:
        stale_after_ns: Age beyond which the free capacity is unknown, ns: no request has queued
            since.
    """

    def __init__(self, stale_after_ns: int) -> None:
        self._stale_after_ns = stale_after_ns
        self._landed_at_ns: dict[int, int | None] = {}
        self._begun_at_ns: dict[int, int] = {}
        """Those that decode, in the order in which they began."""
        self._num_places, self._queued_at_ns = 0, -stale_after_ns - 1
        self._mean_ns, self._square_ns, self._longest_ns = 0.0, 0.0, 0.0

    def expect(self, request_id: int) -> None:
        """Add a request that is prefilled."""
        self._forget(request_id)
        self._landed_at_ns[request_id] = None

    def landed(self, request_id: int, now_ns: int) -> None:
        """Record that the blocks of a request are there; one that is not expected stays out."""
        if request_id in self._landed_at_ns:
            self._landed_at_ns[request_id] = now_ns

    def begun(self, request_id: int, now_ns: int) -> None:
        """Record that decode took a request; one that is not expected stays out."""
        if request_id not in self._landed_at_ns:
            return
        landed_at_ns = self._landed_at_ns.pop(request_id)
        waited_ns = 0 if landed_at_ns is None else now_ns - landed_at_ns
        self._begun_at_ns[request_id] = now_ns
        self._longest_ns = max(waited_ns, self._longest_ns * _FADING)
        num_decoding = len(self._begun_at_ns)
        if waited_ns >= QUEUED_NS:
            self._num_places, self._queued_at_ns = num_decoding, now_ns
        elif num_decoding > self._num_places:
            self._num_places = num_decoding

    def end(self, request_id: int, now_ns: int) -> None:
        """Remove a request that is over; one that is not there changes nothing."""
        begun_at_ns = self._forget(request_id)
        if begun_at_ns is not None:
            weight, took_ns = _WEIGHT if self._mean_ns else 1.0, now_ns - begun_at_ns
            self._mean_ns += weight * (took_ns - self._mean_ns)
            self._square_ns += weight * (took_ns * took_ns - self._square_ns)

    def wait(self, now_ns: int) -> DecodeWait:
        """Return the predicted wait of a request, by the time from now after which it lands.

        None waits while no request has queued for long: then decode has taken every one at once.
        """
        num_decoding = len(self._begun_at_ns)
        if not num_decoding or now_ns - self._queued_at_ns > self._stale_after_ns:
            return NO_WAIT
        ahead = len(self._landed_at_ns) - (self._num_places - num_decoding)
        if ahead < 0 or not self._mean_ns:
            return NO_WAIT
        free_after_ns = self._free_after_ns(ahead, now_ns)
        return DecodeWait(free_after_ns, round(_GROWTH_MAX * self._longest_ns))

    @property
    def num_held(self) -> int:
        """Requests in transit, waiting and decoding; 0 when all is over."""
        return len(self._landed_at_ns) + len(self._begun_at_ns)

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        begun = [*self._begun_at_ns.values()]
        hold(
            those_that_decode_are_in_order=begun == sorted(begun),
            nobody_lands_and_decodes=not self._landed_at_ns.keys() & self._begun_at_ns.keys(),
        )

    def _free_after_ns(self, ahead: int, now_ns: int) -> int:
        """Time until a place is free for a request with `ahead` others before it.

        Requests that take equally long end in the order in which they began. The more their times
        differ, the less their ages say, and places fall free at an even pace.
        """
        num_decoding = len(self._begun_at_ns)
        rounds, place = divmod(ahead, num_decoding)
        (begun_at_ns,) = islice(self._begun_at_ns.values(), place, place + 1)
        left_ns = begun_at_ns - now_ns + self._mean_ns
        in_order_ns = max(0.0, left_ns) + rounds * self._mean_ns
        even_ns = (ahead + 1) * self._mean_ns / num_decoding
        variation = min(1.0, max(0.0, self._square_ns / self._mean_ns**2 - 1.0))
        return round(in_order_ns + variation * (even_ns - in_order_ns))

    def _forget(self, request_id: int) -> int | None:
        """Remove a request; when it began to decode, if it did."""
        self._landed_at_ns.pop(request_id, None)
        return self._begun_at_ns.pop(request_id, None)
