"""Possible routes of a request: an instance in the PD cluster, and one in each PrfaaS cluster.

A route that a request could take, and all that were considered for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from prfaas.core.dispatch.hosts import DestinationMemory, Hosts
from prfaas.core.dispatch.instances import Instance, PrefillInstances, Reach
from prfaas.core.dispatch.links import Link, Links
from prfaas.core.dispatch.scoring import MIXED_WEIGHTS, PREFILL_WEIGHTS, Candidate, Weights
from prfaas.core.dispatch.stages import DecodeBook, PrefillTimes
from prfaas.core.dispatch.types import (
    NOTHING,
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
    Routed,
    ThresholdMoved,
)
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import shipped_bytes
from prfaas.core.kv.source_sets import without
from prfaas.core.routing.calibration import CarriedBytes, corrected
from prfaas.core.routing.decision import Decision, Path, Reason, RoutingFacts
from prfaas.core.routing.policies import PolicyName, with_pull
from prfaas.core.routing.predictions import (
    NO_PROFILE,
    NO_WAIT,
    DecodeWait,
    PathSignals,
    PathWork,
    Prediction,
    ScaledBytes,
    predict,
)
from prfaas.records import Record
from prfaas.units import BITS_PER_BYTE, NS_PER_S

_LOCAL, _REMOTE = Path.LOCAL, Path.REMOTE


class RouteOption(Record, frozen=True):
    """A route through one PrfaaS cluster, or past it in the PD cluster."""

    cluster: RemoteCluster
    local: Candidate | None
    """Instance of the PD cluster that would prefill, or that would decode as well; None when none
    can."""
    remote: Candidate | None
    """Instance of the PrfaaS cluster that would prefill; None when none can."""
    link: Link
    """From its pool to the PD cluster's."""
    facts: RoutingFacts
    """Inputs of a policy."""
    prediction: Prediction
    signals: PathSignals
    """What the prediction was made from."""
    candidates: Sequence[Candidate]
    """In the PrfaaS cluster, the first ones that were scored."""
    prefill_pools: tuple[str, str]
    """Pools of `home` and of `away`."""
    held_tokens: tuple[int, int]
    """Cached prefix in each of these, tokens."""
    pull_link: Link
    """From the pool of the PrfaaS cluster with the longest prefix to that of `home`."""

    def routed(self, decision: Decision, local: str, *, is_mixed: bool) -> Routed:
        """The route of a request that takes this option.

        Args:
            decision: The path; it can be taken.
            local: Name of the PD cluster.
            is_mixed: Its instances prefill and decode.
        """
        facts, link, costs, work = self.facts, self.link, self.cluster.costs, self.prediction.work
        is_remote = decision.path is _REMOTE
        prefill = self.remote if is_remote else self.local
        assert prefill is not None  # noqa: S101 (refused or barred before)
        pull = decision.pull_tokens if costs and not is_remote else 0
        hit, shipped_bytes = prefill.hit_tokens + pull, 0
        pulled_from = self.pull_link.source if pull else prefill.pulled_from
        if is_remote and work is not None:
            shipped_bytes = work.shipped_bytes
        elif costs and pull:
            shipped_bytes = costs.shipped_bytes(hit, self.held_tokens[0])
        return Routed(
            decision,
            facts,
            self.cluster.name if is_remote else local,
            prefill.name,
            self.local.name if self.local and is_mixed else None,
            link.source if is_remote else pulled_from,
            link.destination,
            hit,
            shipped_bytes,
            self.prefill_pools[is_remote],
            self.held_tokens[is_remote],
            pulled_from,
        )

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Open routes first, then the one of least time and bytes."""
        found = self.prediction
        time_ns = found.bytes_ns + (found.remote_ns or 0)
        return self.facts.obstacle is not None, found.remote_ns is None, time_ns

    def misses(self, target_ns: int, path: Path) -> bool:
        """Return True if no path meets the target, nor `path` without transfer and decode."""
        found = self.prediction
        local_ns, remote_ns, alone_ns = found.local_ns, found.remote_ns, found.computed_ns
        if local_ns is None or local_ns <= target_ns:
            return False
        if self.facts.obstacle is None and (remote_ns is None or remote_ns <= target_ns):
            return False
        if path is _LOCAL:
            alone_ns = local_ns - found.local_decode_ns
        return alone_ns is not None and alone_ns > target_ns


class Considered(Record, frozen=True):
    """All routes that were considered for a request."""

    num_tokens: int
    """Length of the prompt for the scorers, tokens."""
    options: Sequence[RouteOption]
    """Through each PrfaaS cluster; at least one."""
    at_local: Sequence[Candidate]
    """Candidates in the PD cluster, the first ones that were scored."""
    local_weights: Weights

    def missed(self, routed: Routed) -> Iterator[RouteOption]:
        """Options whose PrfaaS pool would have spared the local prefill of a request.

        What is prefilled remotely comes to the PD cluster by itself, and so does what is pulled.
        """
        if routed.decision.path is _LOCAL and not routed.pulls:
            for option in self.options:
                held = option.facts.pullable_tokens > routed.present_tokens
                if held and option.cluster.costs and option.link.destination == routed.destination:
                    yield option

    @property
    def best(self) -> RouteOption:
        """The selected one; `obstacle` has the reason if its remote path is barred."""
        options = self.options
        return options[0] if len(options) == 1 else min(options, key=lambda option: option.rank)


SACRIFICED_MAX = 3
"""Targets: a request that is late anyway is not sent to a queue that is longer than these."""
UTILISATION_MAX = 0.9
"""A busier link is taken to be as busy: the delay that one more transfer causes has no end."""
EXPECTED_TOKENS = 32_768
"""Length at which the bytes of a layout are compared with the plan's."""
CHANGE_MIN = 1.25
"""Change of the factor of bytes, as a ratio, after which observed times are forgotten."""
DRAIN_NS_MAX = 30 * NS_PER_S
"""Without a target: a link that lags further behind prefill is promised nothing more."""


class RouteFinder:
    """Instances, links and expected times, and the routes through them.

    Args:
        local: Name of the PD cluster.
        settings: How requests are routed.
    """

    def __init__(
        self, local: LocalCluster, remotes: Sequence[RemoteCluster], settings: DispatchSettings
    ) -> None:
        self._settings = settings
        self._drain_ns_max = settings.ttft_max_ns or DRAIN_NS_MAX
        self._spares_shared_cores = settings.policy is PolicyName.OBSERVED
        self.remotes = {remote.name: remote for remote in remotes} or {"": RemoteCluster("", ())}
        everyone = (*local.prefill, *(local.decode or ()))
        self.links = Links(
            settings,
            {instance.pool: remote for remote in remotes for instance in remote.instances},
            [member.pool for member in everyone],
        )
        self.rooms = DestinationMemory()
        weights = MIXED_WEIGHTS if local.decode is None else PREFILL_WEIGHTS
        self.local = PrefillInstances(local.prefill, settings.stale_after_ns, weights)
        self.remote_stages = {
            remote.name: PrefillInstances(remote.instances, settings.stale_after_ns)
            for remote in self.remotes.values()
        }
        self.stage_of = {
            name: stage
            for stage in (self.local, *self.remote_stages.values())
            for name in stage.instances
        }
        self.times = PrefillTimes(local, self.remotes.values(), settings)
        self.carried = CarriedBytes()
        """Correction of the plan's bytes."""
        self._planned, self._local_planned = dict(self.remotes), local.costs
        self._layout_id: bytes | None = None
        self._first_pool = everyone[0].pool if everyone else ""
        self.decode_book = None if local.decode is None else DecodeBook(local.decode)
        """Instances that only decode; None where those that prefill decode as well."""
        pools = [member.pool for member in everyone]
        alone_ns = self.times.alone_ns
        self.hosts = Hosts(
            pools, self.links, self.rooms, partial(alone_ns, local.name), local.costs
        )
        self.remote_hosts = {
            name: Hosts(
                [member.pool for member in remote.instances],
                self.links,
                self.rooms,
                partial(alone_ns, name),
                remote.costs,
            )
            for name, remote in self.remotes.items()
        }

    def add(self, cluster: str, member: ClusterMember) -> None:
        """Add an instance to the PD cluster, or to the PrfaaS cluster of this name."""
        remote = self.remotes.get(cluster)
        stage = self.local if remote is None else self.remote_stages[cluster]
        stage.add(member)
        self.stage_of[member.name] = stage
        self.links.know(member.pool, remote)
        (self.hosts if remote is None else self.remote_hosts[cluster]).add(member.pool)

    def remove_pool(self, pool: str) -> None:
        """Forget a pool and its links; no open request uses it."""
        self.links.forget(pool)
        self.rooms.forget(pool)
        for hosts in (self.hosts, *self.remote_hosts.values()):
            hosts.remove(pool)

    def hosts_of(self, routed: Routed) -> Hosts:
        """Hosts of the cluster that prefills."""
        return self.remote_hosts.get(routed.cluster, self.hosts)

    def remove(self, name: str, now_ns: int) -> None:
        """Forget an instance that no open request uses."""
        self.stage_of.pop(name).remove(name, now_ns)

    # Bytes of prompts

    def expect_bytes(self, layout: Layout, now_ns: int) -> None:
        """An engine has blocks of this layout, which transfers will ship."""
        self.links.least_threshold = layout.boundary_tokens
        costs = next((each.costs for each in self._planned.values() if each.costs), None)
        if costs is None or layout.layout_id == self._layout_id:
            return
        self._layout_id, before = layout.layout_id, self.carried.factor
        real = shipped_bytes(layout, have_tokens=0, final_tokens=EXPECTED_TOKENS)
        self.carried.expect(costs.shipped_bytes(EXPECTED_TOKENS, 0), real)
        self._scale_bytes(before, now_ns)

    def observe_bytes(self, routed: Routed, num_bytes: int, now_ns: int) -> None:
        """The blocks of a route that comes from a PrfaaS cluster have landed."""
        pool = self.links.cluster_of(routed.source)
        costs = None if pool is None else self._planned[pool].costs
        if costs is None:
            return
        is_remote, before = routed.decision.path is _REMOTE, self.carried.factor
        length = routed.facts.num_prompt_tokens if is_remote else routed.hit_tokens
        held = routed.present_tokens if is_remote else routed.prefill_pool_tokens
        self.carried.observe(costs.shipped_bytes(length, held), num_bytes)
        self._scale_bytes(before, now_ns)

    def _scale_bytes(self, before: float, now_ns: int) -> None:
        """Apply the factor of bytes to the costs of all clusters."""
        factor = self.carried.factor
        if factor == before:
            return
        for name, planned in self._planned.items():
            if planned.costs is not None:
                costs = planned.costs if factor == 1.0 else ScaledBytes(planned.costs, factor)
                self.remotes[name] = replace(planned, costs=costs)
                self.remote_hosts[name].costs = costs
        if self._local_planned is not None:
            self.hosts.costs = (
                self._local_planned if factor == 1.0 else ScaledBytes(self._local_planned, factor)
            )
        if not 1 / CHANGE_MIN <= factor / before <= CHANGE_MIN:
            # They were compared with predictions for other bytes.
            for calibration in self.times.remote_calibrations.values():
                calibration.restart(now_ns)

    @property
    def _default_pool(self) -> str:
        """Destination while no instance of the PD cluster is ready."""
        return self.local.first_pool or self._first_pool

    def consider(
        self, arrival: Arrival, now_ns: int, decode_wait: DecodeWait = NO_WAIT
    ) -> Considered:
        """Compare the routes of a request."""
        fetch = self.hosts.fetch(arrival, now_ns)
        at_local = self.local.pick(arrival, now_ns, None, fetch)
        local = at_local.candidate
        destination = self._destination(arrival, local, now_ns)
        options = [
            self._through(remote, arrival, local, destination, now_ns, decode_wait)
            for remote in self.remotes.values()
        ]
        return Considered(
            arrival.num_tokens_to_fit, options, at_local.looked_at, self.local.weights
        )

    def note(self, option: RouteOption) -> None:
        """Use an admitted request as evidence for the threshold of its link."""
        work = option.prediction.work
        if work is None or self._settings.policy is not PolicyName.ADAPTIVE:
            return
        if option.facts.obstacle in (Reason.NOT_OFFLOADABLE, Reason.NOTHING_TO_SHIP):
            work = PathWork(work.num_new_tokens, work.local_ns, None, 0)
        option.link.balance.note(work)

    def learn(self, now_ns: int) -> list[ThresholdMoved]:
        """Adjust the threshold of every link to recently admitted requests."""
        if self._settings.policy is not PolicyName.ADAPTIVE:
            return []
        num_local, least = (
            self.local.book.num_ready / len(self.remote_stages),
            self.links.least_threshold,
        )
        moves = []
        for stage in self.remote_stages.values():
            for link in self.links:
                if link.source in stage.pools and not link.is_in_site:
                    moves.append(link.learn(num_local, stage.book.num_ready, now_ns, least))
        return [moved for moved in moves if moved is not None]

    def apart(self, option: RouteOption, arrival: Arrival, path: Path, now_ns: int) -> RouteOption:
        """Queue a request that is late on both paths where it delays no other.

        When queues alone make it miss the target wherever it goes, it joins the longest queue of
        its cluster. So the lost ones gather at one instance, and the others stay in time; spread
        evenly, they would make everybody late. Only `adaptive` does so.
        """
        target_ns = self._settings.ttft_max_ns
        if self._settings.policy is not PolicyName.ADAPTIVE or target_ns is None:
            return option
        calibration = self.times.calibration(path, option.cluster.name)
        if calibration.is_refuted or not option.misses(target_ns, path):
            return option
        wait_ns_max = SACRIFICED_MAX * target_ns
        if path is _LOCAL and option.local is not None:
            local = self.local.last_like(option.local, arrival, now_ns, wait_ns_max)
            held = option.facts.present_tokens
            facts = option.facts._replace(
                pd_hit_tokens=local.hit_tokens, device_only_tokens=local.hit_tokens - held
            )
            return option._replace(local=local, facts=facts)
        if path is _REMOTE and option.remote is not None:
            stage = self.remote_stages[option.cluster.name]
            return option._replace(
                remote=stage.last_like(option.remote, arrival, now_ns, wait_ns_max)
            )
        return option

    def _destination(self, arrival: Arrival, local: Candidate | None, now_ns: int) -> str:
        """Pool that a request is decoded from, whichever path it takes."""
        prefill_pool = self.local.instances[local.name].pool if local else ""
        if self.decode_book is None or len(self.hosts.pools.names) < 2:
            return prefill_pool or self._default_pool
        num_open = self.decode_book.least(arrival.avoid)
        found = self.hosts.decode_pool(arrival, prefill_pool, num_open, now_ns)
        return found or self._default_pool

    def _reach(self, at_local: Instance | None, destination: str) -> Reach:
        """Return what keeps blocks of an instance from a pool and from the local instance."""
        between, spares = self.links.between, self._spares_shared_cores

        def reach(instance: Instance) -> tuple[bool, Reason | None, bool]:
            """A layout that is not known does not disagree: its engine is not connected."""
            unreachable = between(instance.pool, destination).why_down
            if at_local is None:
                return True, unreachable, True
            wanted, layout = at_local.layout_id, instance.layout_id
            if wanted is None or layout is None:
                if unreachable is None or unreachable is Reason.LINK_DOWN:
                    unreachable = Reason.ENGINE_NOT_CONNECTED
                return True, unreachable, True
            adds_cores = not (spares and at_local.name in instance.within)
            return layout == wanted, unreachable, adds_cores

        return reach

    def _through(
        self,
        remote: RemoteCluster,
        arrival: Arrival,
        local: Candidate | None,
        destination: str,
        now_ns: int,
        decode_wait: DecodeWait,
    ) -> RouteOption:
        stage = self.remote_stages[remote.name]
        residency = self._settings.residency
        is_outside = bool(residency.tenants) and residency.bars(arrival.tenant, remote.name)
        if is_outside:
            arrival = _unseen(arrival, stage)
        at_local = self.local.instances[local.name] if local else None
        prefill_pool = at_local.pool if at_local else destination
        hosts = self.remote_hosts[remote.name]
        fetch = hosts.fetch(arrival, now_ns)
        picked = stage.pick(
            arrival,
            now_ns,
            self._reach(at_local, destination),
            fetch,
            lambda: not self.links.is_any_up(stage.pools, destination),
        )
        remote_candidate = picked.candidate
        source = (
            stage.instances[remote_candidate.name].pool if remote_candidate else stage.first_pool
        )
        link = self.links.between(source, destination)
        hits, shippable = arrival.hits, arrival.shippable_tokens
        present = hits.get(destination, 0)
        held = local.hit_tokens if local else present
        held_there = hits.get(source, 0)
        pullable, pull_link = held_there, link
        if fetch is not None or prefill_pool != destination:
            pullable, holder = hosts.longest(arrival, prefill_pool)
            pull_link = self.links.between(holder or source, prefill_pool)
        there = remote_candidate.hit_tokens if remote_candidate else held_there
        splits = arrival.offloadable and (shippable is None or shippable > held)
        local_ns, remote_ns = (
            local.wait_ns if local else None,
            remote_candidate.wait_ns if remote_candidate else None,
        )
        signals = link.signals(local_ns, remote_ns, now_ns)
        obstacle = picked.obstacle if arrival.may_ship else Reason.LINK_LIMIT
        if not splits:
            is_split = arrival.offloadable
            obstacle = Reason.NOTHING_TO_SHIP if is_split else Reason.NOT_OFFLOADABLE
        if is_outside:
            obstacle = Reason.REGION
        if obstacle is None and not self.rooms.fits(
            destination, arrival.layout, present, shippable or 0
        ):
            obstacle = Reason.NO_ROOM
        if obstacle is None and signals.link_lag_ns > self._drain_ns_max:
            obstacle = Reason.LINK_FULL
        facts = RoutingFacts(
            arrival.num_prompt_tokens,
            pd_hit_tokens=held,
            prfaas_hit_tokens=there,
            obstacle=obstacle,
            device_only_tokens=held - present,
            remote_device_only_tokens=there - pullable,
        )
        in_pool = present if prefill_pool == destination else hits.get(prefill_pool, 0)
        found = self._predict(
            facts, signals, remote, decode_wait, link, now_ns, pull=(pull_link, in_pool)
        )
        if prefill_pool != destination and found.local_ns is not None:
            tail_ns = self.hosts.tail_ns(arrival, prefill_pool, destination, now_ns)
            found = found._replace(local_ns=found.local_ns + tail_ns)
        return RouteOption(
            remote,
            local,
            remote_candidate,
            link,
            facts,
            found,
            signals,
            picked.looked_at,
            (prefill_pool, source),
            (in_pool, held_there),
            pull_link,
        )

    def _predict(
        self,
        facts: RoutingFacts,
        signals: PathSignals,
        remote: RemoteCluster,
        decode_wait: DecodeWait,
        link: Link,
        now_ns: int,
        *,
        pull: tuple[Link, int],
    ) -> Prediction:
        """Times of both paths, the cost of bytes, and a pulled prefix where that is faster.

        Args:
            pull: The link that brings the prefix, and what is at its end already, tokens.
        """
        costs, settings, times = remote.costs, self._settings, self.times
        if costs is None:
            return NO_PROFILE
        ns_per_byte, delay_ns_per_byte = link.ns_per_byte, 0.0
        state, is_adaptive = signals.link, settings.policy is PolicyName.ADAPTIVE
        if is_adaptive and state is not None and state.bits_per_s:
            # In a queue that is busy for a share u of the time, a second of work delays the others
            # by u / (1 - u) seconds in all.
            use = min(link.book.mean_utilisation(now_ns), UTILISATION_MAX)
            delay_ns_per_byte = BITS_PER_BYTE * NS_PER_S / state.bits_per_s * use / (1 - use)
        found = predict(
            facts,
            signals,
            costs,
            decode_wait,
            ns_per_byte=ns_per_byte,
            delay_ns_per_byte=delay_ns_per_byte,
        )
        if settings.pulls and is_adaptive and (pull[0] is link or pull[0].up):
            if pull[0] is not link:
                signals = signals._replace(link=pull[0].book.latest(now_ns))
            found = with_pull(found, facts, signals, costs, ns_per_byte, decode_wait, pull[1])
        remote_factor = times.remote_calibrations[remote.name].factor
        return corrected(found, signals, times.local_calibration.factor, remote_factor)


def _unseen(arrival: Arrival, stage: PrefillInstances) -> Arrival:
    """A request without what instances and pools of a cluster have cached of it."""
    hits = without(arrival.hits, stage.sources)
    return arrival._replace(hits=hits, hints=NOTHING)
