"""The decision driver: events in, decisions out. The gateway and the simulator both run it.

    ready, layouts, links, reports ──┐
    arrival ─► pick instances ─► predict ─► policy ─► admission ─► Routed or Refused
                                     ▲                                  │
                     landed, given up, ended ◄──────────────────────────┘

It knows what a gateway knows: prompts, cache hits, reports with their age, and what it has sent
itself. Time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from prfaas.core.admission.deadline_admission import AdmissionControl
from prfaas.core.dispatch.expected_times import ExpectedTimes
from prfaas.core.dispatch.instance_load import InstanceLoad
from prfaas.core.dispatch.links import Links
from prfaas.core.dispatch.market.offers import decided, offers_of
from prfaas.core.dispatch.open_requests import OpenRequests
from prfaas.core.dispatch.route_finder import Considered, RouteFinder, RouteOption
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RefusalReason,
    RefusedRequest,
    RemoteCluster,
    Routed,
    ThresholdMoved,
)
from prfaas.core.invariants import hold
from prfaas.core.kv.blocks import Layout
from prfaas.core.market.choice import RequestTerms
from prfaas.core.market.classes import terms_of
from prfaas.core.routing.calibration import Calibration
from prfaas.core.routing.decision import Decision, Path, Reason
from prfaas.core.routing.observed import NominalWork
from prfaas.core.routing.policies import PolicyName

_LOCAL, _REMOTE = Path.LOCAL, Path.REMOTE

RETRY_UNSERVED_S = 1

PrefillMeter = Callable[[Arrival, Routed, int, int], None]
"""Counts a booked prefill: request, route, work of an instance, ns, and the work that the cached
prefix saves it; both are 0 without a profile."""


class Dispatcher:
    """Decides for every request, from reports and from what open requests have booked.

    Args:
        local: Name of the PD cluster.
        settings: How requests are routed.
    """

    def __init__(
        self, local: LocalCluster, remotes: Sequence[RemoteCluster], settings: DispatchSettings
    ) -> None:
        if settings.policy is PolicyName.OBSERVED:
            local = replace(local, costs=None)
            remotes = [replace(remote, costs=None) for remote in remotes]
        self._settings = settings
        self._admission = AdmissionControl(settings.ttft_max_ns, settings.fairness)
        self._routes = RouteFinder(local, remotes, settings)
        self._times, self._stage_of = self._routes.times, self._routes.stage_of
        self.links: Links = self._routes.links
        """State of the links."""
        self.rooms = self._routes.rooms
        """Memory of the PD cluster's pools, and what is in transit to it."""
        self.carried = self._routes.carried
        """Correction of the plan's bytes."""
        self.requests = OpenRequests(local, self._routes, self._admission)
        """Requests that were admitted and have not ended."""
        self.expected = ExpectedTimes(self.requests, self._routes)
        self.market = settings.market
        self._local = local.name
        self._meter: PrefillMeter | None = None
        self._is_counted = self.market is not None
        self._buys = settings.policy is PolicyName.COST and self.market is not None
        self._usual = RequestTerms(settings.second_price or 0.0, settings.ttft_max_ns)
        self.spared_ns = 0
        """Offloaded prefill below the threshold, ns of an instance."""

    def count_prefills(self, meter: PrefillMeter) -> None:
        """Call `meter` with each prefill from now on."""
        self._meter, self._is_counted = meter, True

    # What there is

    def add(self, cluster: str, member: ClusterMember, decode: str = "") -> None:
        """Add an instance; it is not ready, and its limits and layout are unknown.

        Args:
            cluster: Name of its cluster; one that is not a PrfaaS cluster is the PD cluster.
            decode: Its name as one that decodes, where PD instances have roles.
        """
        self._routes.add(cluster, member)
        self.requests.instances.add(member, decode)

    def remove(self, name: str, now_ns: int, decode: str = "") -> None:
        """Forget an instance; `decode` as in `add`.

        Raises:
            ValueError: An open request uses it.
        """
        if self.requests.uses(name, decode or name):
            raise ValueError(f"instance {name} has open requests; wait for their end")
        self._routes.remove(name, now_ns)
        self.requests.instances.remove(name, decode, now_ns)

    def remove_pool(self, pool: str) -> None:
        """Forget a pool and its links; no open request uses it."""
        self._routes.remove_pool(pool)

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance became healthy, with an empty queue, or stopped being so."""
        self.requests.instances.set_ready(name, ready=ready, now_ns=now_ns)

    def describe(self, name: str, *, num_tokens_max: int, layout_id: bytes | None) -> None:
        """Set the limits of a prefill instance; a layout of None is unknown."""
        instance = self._stage_of[name].instances[name]
        instance.num_tokens_max, instance.layout_id = num_tokens_max, layout_id

    def expect_bytes(self, layout: Layout, now_ns: int) -> None:
        """An engine has blocks of this layout: correct the plan's bytes until transfers do."""
        self._routes.expect_bytes(layout, now_ns)

    def set_link(
        self, source: str, destination: str, *, up: bool, why_down: Reason = Reason.LINK_DOWN
    ) -> list[int]:
        """The link between two pools came up or broke; it is down at first.

        Args:
            why_down: One of `UNREACHABLE`, if it is not up.

        Returns:
            When it broke: the requests whose blocks are in transit over it.
        """
        link = self.links.between(source, destination)
        link.why_down = None if up else why_down
        return [] if up else self.requests.crossing(source, destination)

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        self.requests.validate()
        self.rooms.validate()
        for stage in {id(stage): stage for stage in self._stage_of.values()}.values():
            stage.validate()
        for link in self.links:
            link.book.validate()
            link.balance.validate()
        if self.requests.decode_book is not None:
            self.requests.decode_book.validate()
        hold(
            nothing_is_in_transit_without_requests=len(self.requests) > 0
            or not self.rooms.taken_bytes
        )

    # Reports

    def report_load(self, name: str, observed_at_ns: int, num_waiting: int) -> None:
        """Report the requests that waited for prefill at an instance at `observed_at_ns`."""
        self._stage_of[name].book.report(name, observed_at_ns, num_waiting)

    def report_loads(self, observed_at_ns: int, num_waiting: list[tuple[str, int]]) -> None:
        """The same for several instances observed together."""
        stage_of = self._stage_of
        for name, waiting in num_waiting:
            stage_of[name].book.report(name, observed_at_ns, waiting)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        """One interval of the short-term loop has passed; thresholds that moved are returned."""
        if not self._settings.moving_threshold:
            return self._routes.learn(now_ns)
        local_ns, least = self._routes.local.least_wait_ns(now_ns), self.links.least_threshold
        moves = []
        for stage in self._routes.remote_stages.values():
            remote_ns = stage.least_wait_ns(now_ns)
            links = [
                link for link in self.links if link.source in stage.pools and not link.is_in_site
            ]
            moves += [link.move(local_ns, remote_ns, now_ns, least) for link in links]
        return [moved for moved in moves if moved is not None]

    def replan(self, offload_threshold: int) -> list[ThresholdMoved]:
        """The long-term loop found a better threshold, tokens, above 0: that of all links whose
        threshold the operator has not set. Those that changed are returned."""
        now, moves = max(offload_threshold, self.links.least_threshold), []
        for link in self.links:
            before = link.replan(now)
            if before is not None and not link.is_in_site:
                moves.append(ThresholdMoved(link.source, link.destination, before, now))
        return moves

    # Requests

    def arrive(
        self, arrival: Arrival, now_ns: int, *, again: bool = False
    ) -> Routed | RefusedRequest:
        """Decide for a request, and book what was decided: `consider` and `decide` in one."""
        return self.decide(arrival, self.consider(arrival, now_ns), now_ns, again=again)

    def consider(self, arrival: Arrival, now_ns: int) -> Considered:
        """Compare the routes of a request; what it has booked already is aborted."""
        self.requests.end(arrival.request_id, now_ns)
        return self._routes.consider(arrival, now_ns, self.requests.decode_wait(now_ns))

    def decide(
        self, arrival: Arrival, considered: Considered, now_ns: int, *, again: bool = False
    ) -> Routed | RefusedRequest:
        """Decide between the routes of a request, and book what was decided.

        Args:
            considered: Its routes, as of now.
            again: It was admitted before; admission is not asked.
        """
        if self._buys:
            option, decision = self._bought(arrival, considered, now_ns)
        else:
            option = considered.best
            decision = self._decide(option, now_ns)
        if option.local is None:
            option, decision = self._served(option, decision, considered)
        path = decision.path
        if option.local is None and self._is_unserved(path):
            return RefusedRequest(RefusalReason.NO_INSTANCE, RETRY_UNSERVED_S, decision)
        if not again:
            if self._settings.admission:
                refused = self._refuse(arrival, decision, option, now_ns)
                if refused is not None:
                    return refused
            self._routes.note(option)
        option = self._routes.apart(option, arrival, path, now_ns)
        routed = self.requests.enter(arrival, decision, option, now_ns, again=again)
        if decision.reason is Reason.FASTER_REMOTE:
            self.spared_ns += self._local_ns(decision, option)
        if self._is_counted:
            self._spend(arrival, routed, option, now_ns)
        return routed

    def foresee(self, arrival: Arrival, now_ns: int) -> Routed | RefusedRequest:
        """Return the decision for a request, without admission and side effects."""
        decode_wait = self.requests.decode_wait(now_ns)
        considered = self._routes.consider(arrival, now_ns, decode_wait)
        if self._buys:
            option, decision = self._bought(arrival, considered, now_ns, is_real=False)
        else:
            option = considered.best
            decision = self._decide(option, now_ns)
        if option.local is None:
            option, decision = self._served(option, decision, considered)
        if option.local is None and self._is_unserved(decision.path):
            return RefusedRequest(RefusalReason.NO_INSTANCE, RETRY_UNSERVED_S, decision)
        option = self._routes.apart(option, arrival, decision.path, now_ns)
        return option.routed(decision, self._local, is_mixed=self.requests.decode_book is None)

    def _bought(
        self, arrival: Arrival, considered: Considered, now_ns: int, *, is_real: bool = True
    ) -> tuple[RouteOption, Decision]:
        """The route of least cost, and why."""
        option = considered.best
        assert self.market is not None  # noqa: S101 (it buys)
        terms, num_new_tokens = terms_of(arrival.service, self._usual), option.facts.num_new_tokens
        offers = offers_of(considered.options, self._local, self._times)
        choice = self.market.consider(offers, terms, num_new_tokens, now_ns)
        if is_real:
            self.market.chosen(choice, terms, num_new_tokens)
        threshold = option.link.policy.offload_threshold
        return decided(choice, considered.options, option, self._local, threshold)

    def _spend(self, arrival: Arrival, routed: Routed, option: RouteOption, now_ns: int) -> None:
        """Count a prefill, its cost, and that of the blocks that cross a link for it."""
        cluster, hit, times = routed.cluster, routed.hit_tokens, self._times
        is_remote = routed.decision.path is _REMOTE
        prefill_ns = partial(times.remote_ns, cluster) if is_remote else times.local_ns
        work_ns = prefill_ns(routed.num_tokens_to_prefill, hit)
        if self._meter is not None and times.has_plan:
            saved_ns = prefill_ns(routed.facts.num_prompt_tokens, 0) - work_ns
            self._meter(arrival, routed, work_ns, max(0, saved_ns))
        elif self._meter is not None:
            self._meter(arrival, routed, 0, 0)
        if self.market is not None:
            link = option.cluster.name
            self.market.spend(cluster, work_ns, routed.shipped_bytes, link, now_ns)

    def _served(
        self, option: RouteOption, decision: Decision, considered: Considered
    ) -> tuple[RouteOption, Decision]:
        """The decision, or the remote path where no PD instance that prefills is ready.

        Not under the policy `local`, past an obstacle, or where those that prefill also decode.
        """
        if (
            decision.path is _REMOTE
            or decision.reason is Reason.ALWAYS_LOCAL
            or self.requests.decode_book is None
        ):
            return option, decision
        option = considered.best
        if option.remote is None or option.facts.obstacle is not None:
            return option, decision
        found = option.prediction
        return option, decision._replace(
            path=_REMOTE,
            reason=Reason.NO_LOCAL_INSTANCE,
            num_new_tokens=option.facts.num_new_tokens,
            predicted_local_ns=found.local_ns,
            predicted_remote_ns=found.remote_ns,
            pull_tokens=0,
        )

    def _is_unserved(self, path: Path) -> bool:
        """Return True if a path needs a PD instance that prefills."""
        return path is _LOCAL or self.requests.decode_book is None

    def _refuse(
        self, arrival: Arrival, decision: Decision, option: RouteOption, now_ns: int
    ) -> RefusedRequest | None:
        """Ask admission; None if the request is admitted."""
        calibration = self._times.calibration(decision.path, option.cluster.name)
        proven_ns = decision.predicted_ns if calibration.is_proven(now_ns) else None
        work_ns = self._local_ns(decision, option)
        found = self._admission.decide(
            arrival.tenant, decision.path, proven_ns, work_ns, now_ns, arrival.service
        )
        if found.admitted:
            return None
        return RefusedRequest(RefusalReason.PREDICTED_LATE, found.retry_after_s, decision)

    def _decide(self, option: RouteOption, now_ns: int) -> Decision:
        """The policy's decision; what was observed may keep a prompt local."""
        decision = option.link.policy.decide(option.facts, option.prediction)
        first_tokens, local, remote = self._times.first_tokens, option.local, option.remote
        if first_tokens is None or local is None or remote is None:
            return decision
        if decision.path is _LOCAL:
            return decision
        own_ns, there = self._local_ns(decision, option), option.facts.prfaas_hit_tokens
        remote_ns = self._times.remote_ns(
            option.cluster.name, option.facts.num_prompt_tokens - there, there
        )
        compared = first_tokens.sooner_at_local(
            option.cluster.name,
            NominalWork(own_ns, own_ns + self.load(local.name).pending_ns(local.name)),
            NominalWork(remote_ns, remote_ns + self.load(remote.name).pending_ns(remote.name)),
            self.requests.instances.num_streaming[local.name],
            now_ns,
        )
        if compared is None:
            return decision
        return decision._replace(
            path=_LOCAL,
            reason=Reason.TRIED_LOCAL if compared.is_trial else Reason.FASTER_LOCAL,
            predicted_local_ns=compared.local_ns,
            predicted_remote_ns=compared.remote_ns,
            unpredicted=None,
        )

    def _local_ns(self, decision: Decision, option: RouteOption) -> int:
        """Work of a request in the PD cluster."""
        new = decision.num_new_tokens
        return self._times.local_ns(new, option.facts.num_prompt_tokens - new)

    # What is known

    @property
    def calibrations(self) -> Mapping[tuple[Path, str], Calibration]:
        """Corrections of predictions, by path and by the cluster that prefills."""
        return self._times.calibrations

    def num_decoded_by(self, name: str) -> int:
        """Open requests that an instance was chosen to decode."""
        return len(self.requests.decoded_by(name))

    def local_bits_per_s(self, now_ns: int) -> float | None:
        """Rate of all links to the PD cluster; None is unknown, or none is up."""
        return self.links.bits_per_s_to(self._routes.local.pools, now_ns)

    def load(self, name: str) -> InstanceLoad:
        """The load book of an instance that prefills."""
        return self._stage_of[name].book

    @property
    def promised_bytes(self) -> int:
        """Bytes promised to all links; 0 when no transfer is open."""
        return sum(link.book.promised_bytes for link in self.links)
