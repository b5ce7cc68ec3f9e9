"""One run: requests through prefill, link and decode, on a virtual clock.

    arrive ─► decide ─┬─ LOCAL ──► PD-P queue ─► prefill ───────────────┐
                      └─ REMOTE ─► PrfaaS queue ─► prefill ∥ link ─► landed ─► decode ─► finished
                           whatever fails or is late: as the core's machine decides

Prefill hands over to decode within the PD cluster at no cost. The first token streams when decode
admits the request. `request_run.py` leads each request, by the machine of `core/request`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from prfaas.core.control.split import instance_of
from prfaas.core.dispatch.types import RefusalReason, RefusedRequest, Routed
from prfaas.core.membership.members import LinkEnds
from prfaas.core.request.events import Blocks, Outcome
from prfaas.core.request.fleet import RequestLimits, SharedState
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.resilience.quarantine import Guards, Target
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.sim.engine.dispatch_driver import News, SimulatedDriver
from prfaas.sim.engine.failures import schedule
from prfaas.sim.engine.reactions import Reactions, SimulatedSuspects
from prfaas.sim.engine.request_run import BEGUN, Alarms, RunParts, SimulatedRequestRun
from prfaas.sim.engine.role_changes import RoleChanges
from prfaas.sim.engine.signals import NUM_SAMPLES_MAX, Series, SimulatedReplication, Telemetry
from prfaas.sim.resources.decode_instance import DecodeInstance
from prfaas.sim.resources.prefill_instance import PrefillInstance, PrefillJob
from prfaas.sim.resources.shared_link import HostLinks, Purpose, SharedLink
from prfaas.sim.resources.transport import Transport
from prfaas.sim.system.clock import NEVER, Action, Arrivals, Clock, Progress
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import ClusterSetup, Setup

_LOOKS = 1 / 1.26
"""Number of checks of a route within its predicted time: the first one is when the route can be
late by its prediction (`core/resilience/late_routes.py`). The gateway checks more often."""
_HAND_OFF, _PULL, _COMMITTED = Blocks.HAND_OFF, Purpose.PULL, TransferEnd.COMMITTED
Chunks = Callable[[int, int], list[tuple[int, int]]]
"""Chunks of a prefill by its new tokens and its cached prefix, as in `PrefillJob`."""


class Simulation(RunParts):
    """A system and its requests.

    Args:
        requests: Those that come by themselves, in order of arrival.
        on_progress: Called with the number of requests that have arrived, now and then.
        num_samples_max: Limit of the time series, even.
    """

    def __init__(
        self,
        setup: Setup,
        requests: Sequence[Request],
        on_progress: Progress | None = None,
        num_samples_max: int = NUM_SAMPLES_MAX,
    ) -> None:
        self.setup = setup
        self.is_early = setup.routing.early_first_token
        self.may_relay = self.is_early and setup.routing.relay_decode
        self.requests: list[Request] = []
        self.clock = Clock()
        self.alarms = Alarms(self.clock)
        self.front = SimulatedDriver(setup)
        self._pools = self.front.caches.pools
        self._hearing: Action = self._heard_of
        self.open: dict[int, SimulatedRequestRun] = {}
        self.reactions = Reactions()
        self.suspects = SimulatedSuspects(
            self.clock, lambda index, event: self.open[index].report(event)
        )
        self.guards = _guards(self.front, self.reactions.changed)
        routing = setup.routing
        times = routing.prefill_timeout_ns or NEVER, routing.transfer_timeout_ns or NEVER
        # A gateway that has a target refuses what would miss it: without that, there is none.
        ttft_ns = setup.slo.ttft_ns if routing.admission else None
        self.fleet = SharedState(
            self.front,
            self.guards,
            RequestLimits(
                *times,
                ttft_ns,
                looks=_LOOKS,
                look_ns_max=NEVER,
                step_ns=round(setup.step_ns(1, 0)),
            ),
        )
        self.transports = {ends: self._transport(ends) for ends in self.front.links}
        self.wans = {each.name: self._wan(each) for each in setup.prfaas}
        self._lanes: dict[str, PrefillInstance] = {}
        decoders = self.front.decode_names or self.front.prefill_names
        self.decoders = {n: self._decode_instance(n) for n in decoders}
        chunks = partial(setup.costs.chunks, is_local=True)
        prefill = partial(self._prefill_instance, shipped=chunks)
        local = prefill if self.front.has_roles else self.lane
        self.locals = {n: local(n) for n in self.front.prefill_names}
        self.remotes = {
            name: self._prefill_instance(name, cluster.costs.chunks)
            for cluster in setup.prfaas
            for name in self.front.prfaas_names[cluster.name]
        }
        self.roles = RoleChanges(self)
        self._arrivals = Arrivals(self.clock, requests, self._come, on_progress)
        self.copier = SimulatedReplication(self) if setup.placement.copies is not None else None
        self.telemetry = Telemetry(self, self.copier)
        self.series = Series(self, self.roles, num_samples_max)

    def _transport(self, ends: LinkEnds) -> Transport:
        setup = self.setup
        cluster = next((each for each in setup.prfaas if ends[0] in each.pools), None)
        is_wan = cluster is not None and ends[1] in setup.pools
        return Transport(
            self.clock,
            ends,
            cluster.link if cluster is not None and is_wan else setup.host_link,
            setup.costs if cluster is None else cluster.costs,
            on_landed=self._landed,
            on_change=self._link_changed,
            told_after_ns=setup.signals.delay_ns,
        )

    def _wan(self, cluster: ClusterSetup) -> list[Transport]:
        """Links of a PrfaaS cluster to the PD cluster; several share the capacity."""
        ends = product(cluster.pools, self.setup.pools)
        found, wan = [self.transports[each] for each in ends], HostLinks()
        for transport in found if len(found) > 1 else ():
            transport.link.join(wan)
        return found

    def _prefill_instance(self, name: str, shipped: Chunks) -> PrefillInstance:
        pool = self.front.pool_of[name]
        return PrefillInstance(
            name,
            self.clock,
            on_start=partial(self._prefill_started, pool, name, shipped),
            on_done=self.front.caches.devices.keeping(name, partial(self._prefilled, pool)),
        )

    def _decode_instance(self, name: str) -> DecodeInstance:
        return DecodeInstance(
            name,
            self.clock,
            self.setup,
            on_first=lambda request: self.open[request.index].first_token(),
            on_done=self._finished,
        )

    def run(self, stop_at_ns: int | None = None) -> None:
        """Run until every request has ended, or until an instant."""
        self._arrivals.start()
        self.telemetry.start()
        self.roles.start()
        self.series.start()
        schedule(self, self.setup.failures)
        if self.busy:
            self.clock.go(stop_at_ns)

    @property
    def busy(self) -> bool:
        """Return True if requests are running or will arrive."""
        return bool(self.open) or self._arrivals.num_left > 0

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self.open)

    @property
    def links(self) -> list[SharedLink]:
        """Links from every PrfaaS cluster to the PD cluster."""
        return [transport.link for wan in self.wans.values() for transport in wan]

    # Arrival and dispatch

    def _come(self, request: Request) -> None:
        self.requests.append(request)
        now_ns = self.clock.now_ns
        self.fleet.retries.deposit(now_ns)
        found, considered = self.front.route(request, now_ns)
        request.decision = found.decision
        if self.setup.roles is not None:
            self.roles.came(request, found.decision.num_new_tokens)
        if isinstance(found, RefusedRequest):
            is_late = found.reason is RefusalReason.PREDICTED_LATE
            self._end(request, Outcome.REJECTED if is_late else Outcome.FAILED)
            return
        if self.copier is not None:
            self.copier.routed(request, found, considered)
        run = self.open[request.index] = self._run_of(request, found)
        run.report(BEGUN)

    def _run_of(self, request: Request, routed: Routed) -> SimulatedRequestRun:
        return SimulatedRequestRun(self, request, routed)

    # Prefill

    def _prefill_started(self, pool: str, name: str, shipped: Chunks, job: PrefillJob) -> None:
        transport = job.transport
        if transport is None:
            self._started(job, pool, name, self.chunks)
            return
        self._started(job, pool, name, shipped)
        transport.start(job.request)
        self.front.choose_decode(job.request.index)

    def _started(self, job: PrefillJob, pool: str, name: str, chunks: Chunks) -> None:
        """A prefill starts: what is cached is looked up again, as engines do."""
        request = job.request
        request.prefill_started_at_ns = self.clock.now_ns
        hit = self.front.caches.resume(request, pool, name)
        held, read_ns = hit.num_tokens, hit.read_ns
        if held != request.num_hit_tokens or read_ns:
            request.num_hit_tokens = held
            request.num_new_tokens = request.num_prompt_tokens - held
            job.chunks = [
                (tokens, end_ns + read_ns)
                for tokens, end_ns in chunks(request.num_new_tokens, held)
            ]

    def _prefilled(self, pool: str, job: PrefillJob) -> None:
        """A prefill has ended; its answer takes as long as a byte of its blocks."""
        request, transport = job.request, job.transport
        self._pools[pool].store(request.block_ids, request.tenant)
        if job.attempt != request.attempt:
            return
        request.prefilled_at_ns = self.clock.now_ns
        if transport is None:
            self.open[request.index].prefilled()
        else:
            self.clock.after(transport.setup.rtt_ns // 2, self._hearing, job)

    def _heard_of(self, job: PrefillJob) -> None:
        """The answer of a prefill leg has crossed the link."""
        if job.attempt == job.request.attempt:
            self.open[job.request.index].prefilled()

    # Link

    def _landed(self, request: Request, transport: Transport, purpose: Purpose) -> None:
        """The blocks of a request have arrived, or the prefix that it waits for."""
        run, which, arrived = self.open[request.index], _HAND_OFF, request.block_ids
        if purpose is _PULL:
            num_blocks = -(-run.routed.hit_tokens // self.setup.blocks.tokens)
            which, arrived = Blocks.PULL, arrived[:num_blocks]
        self._pools[transport.ends[1]].store(arrived, request.tenant)
        run.transfer_ended(which, _COMMITTED, transport)

    def _link_changed(self, transport: Transport, alive: bool) -> None:
        news, ends = News.LINK_ALIVE if alive else News.LINK_DEAD, transport.ends
        self.front.heard.note(news, transport.changed_at_ns, self.clock.now_ns)
        if alive:
            seen = transport.link.report(self.clock.now_ns)
            self.front.dispatcher.links.report(*ends, seen)
        for index in sorted(self.front.set_link(ends, up=alive)):
            self.open[index].link_lost(transport)

    # Decode and the end

    def lane(self, name: str) -> PrefillInstance:
        """Prefill on a decode instance."""
        if name not in self._lanes:
            self._lanes[name] = PrefillInstance(
                name,
                self.clock,
                on_start=partial(self._lane_started, name),
                on_done=partial(self._lane_done, name),
            )
        return self._lanes[name]

    def _lane_started(self, name: str, job: PrefillJob) -> None:
        had = job.request.had_tokens
        memory, pool = instance_of(name), self.front.pool_of[name]
        self._started(job, pool, memory, lambda new, held: self.chunks(new + had, held))
        num_tokens, work_ns = job.chunks[-1]
        num_steps = -(-num_tokens // self.setup.costs.chunk_tokens)
        step_ns = self.decoders[name].compute(work_ns / num_steps if num_steps else 0.0)
        job.chunks = [(num_tokens, work_ns + round(num_steps * step_ns))]

    def _lane_done(self, name: str, job: PrefillJob) -> None:
        self.decoders[name].compute(0.0)
        if job.attempt == job.request.attempt:
            request = job.request
            self._pools[self.front.pool_of[name]].store(request.block_ids, request.tenant)
            self.open[request.index].computed()

    def _finished(self, request: Request) -> None:
        if self.setup.roles is not None:
            self.roles.finished(request)
        self.open[request.index].finished()

    def ended(self, run: SimulatedRequestRun) -> None:
        """A request that was admitted is over."""
        if self.suspects.are_there:
            self.suspects.left(run.request.index)
        if self.open.pop(run.request.index, None) is not None:
            self._end(run.request, run.life.outcome)

    def _end(self, request: Request, outcome: Outcome) -> None:
        request.outcome = outcome
        request.finished_at_ns = self.clock.now_ns
        if request.followers:
            self._arrivals.ended(request)
        if not self.open and not self.busy:
            self.clock.stop()


def _guards(
    front: SimulatedDriver, changed: Callable[[Target, BreakerState, BreakerState], None]
) -> Guards:
    """Breakers of all instances and links."""
    remotes = [name for names in front.prfaas_names.values() for name in names]
    at_local = front.prefill_names, front.decode_names
    return Guards([*at_local[0], *at_local[1], *remotes, *front.links], front, changed, at_local)
