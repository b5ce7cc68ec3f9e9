"""One run: requests through prefill, link and decode, on a virtual clock.

    arrive ─► decide ─┬─ LOCAL ──► PD-P queue ─► prefill ───────────────┐
                      └─ REMOTE ─► PrfaaS queue ─► prefill ∥ link ─► landed ─► decode ─► finished
                           a dead link or instance: decide again, attempt + 1

Prefill hands over to decode within the PD cluster at no cost. The first token streams when decode
admits the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prfaas.core.dispatch.types import Refusal, Refused, Routed
from prfaas.core.routing.decision import Path
from prfaas.sim.engine.decode_instance import DecodeInstance
from prfaas.sim.engine.dispatch_driver import Front
from prfaas.sim.engine.failures import schedule
from prfaas.sim.engine.oracle_check import News
from prfaas.sim.engine.prefill_instance import Job, PrefillInstance
from prfaas.sim.engine.replication import Copier
from prfaas.sim.engine.role_changes import Roles
from prfaas.sim.engine.shared_link import SharedLink
from prfaas.sim.engine.signals import Telemetry
from prfaas.sim.engine.time_series import Series
from prfaas.sim.engine.transport import Transport
from prfaas.sim.system.arrivals import Arrivals, Progress
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import UNSET, Outcome, Request
from prfaas.sim.system.setup import ClusterSetup, Setup


class Simulation:
    """A system and its requests.

    Args:
        setup: The system.
        requests: Those that come by themselves, in order of arrival.
        on_progress: Called with the number of requests that have arrived, now and then.
    """

    def __init__(
        self, setup: Setup, requests: Sequence[Request], on_progress: Progress | None = None
    ) -> None:
        self.setup = setup
        self.requests: list[Request] = []
        self.clock = Clock()
        self.front = Front(setup)
        self.open: dict[int, Request] = {}
        self.num_recomputed = 0
        self._pulling: dict[Request, tuple[str, Job]] = {}
        self.transports = {cluster.name: self._transport(cluster) for cluster in setup.prfaas}
        self.locals = {n: self._prefill_instance(n) for n in self.front.prefill_names}
        self.remotes = {
            name: self._prfaas_instance(name, self.transports[cluster])
            for cluster, names in self.front.prfaas_names.items()
            for name in names
        }
        self.decoders = {n: self._decode_instance(n) for n in self.front.decode_names}
        self.roles = Roles(self)
        self._arrivals = Arrivals(self.clock, requests, self._come, on_progress)
        self.copier = Copier(self) if setup.placement.copies is not None else None
        self.telemetry, self.series = Telemetry(self, self.copier), Series(self, self.roles)

    def _transport(self, cluster: ClusterSetup) -> Transport:
        return Transport(
            self.clock,
            cluster,
            on_landed=self._landed,
            on_pulled=self._pulled,
            on_change=self._link_changed,
            told_after_ns=self.setup.signals.delay_ns,
        )

    def _prefill_instance(self, name: str) -> PrefillInstance:
        return PrefillInstance(
            name,
            self.clock,
            on_start=partial(self._local_started, name),
            on_chunk=_nothing,
            on_done=self.front.caches.devices.keeping(name, self._local_done),
        )

    def _prfaas_instance(self, name: str, transport: Transport) -> PrefillInstance:
        return PrefillInstance(
            name,
            self.clock,
            on_start=partial(self._remote_started, transport, name),
            on_chunk=transport.chunk,
            on_done=self.front.caches.devices.keeping(
                name, partial(self._remote_done, transport.cluster)
            ),
        )

    def _decode_instance(self, name: str) -> DecodeInstance:
        setup = self.setup
        return DecodeInstance(
            name,
            self.clock,
            setup.step_ns,
            setup.decode,
            kv_bytes=self._kv_bytes,
            on_first=self._first,
            on_done=self._finished,
        )

    def _kv_bytes(self, request: Request) -> int:
        """KV bytes that a request holds on average while it decodes.

        Engines take blocks as a sequence grows, and the sequences of a batch are at different
        points of their outputs.
        """
        output = request.num_output_tokens // 2
        return self.setup.costs.kv_bytes(request.num_prompt_tokens + output)

    def _kv_bytes_at_end(self, request: Request) -> int:
        return self.setup.costs.kv_bytes(request.num_prompt_tokens + request.num_output_tokens)

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
        """Whether requests are under way or yet to come."""
        return bool(self.open) or self._arrivals.num_left > 0

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self.open)

    @property
    def links(self) -> list[SharedLink]:
        """From every PrfaaS cluster to the PD cluster."""
        return [transport.home for transport in self.transports.values()]

    # Arrival and dispatch

    def _come(self, request: Request) -> None:
        self.requests.append(request)
        self.open[request.index] = request
        self._route(request, again=False)

    def again(self, request: Request) -> None:
        """What a request had is lost but for blocks that arrived: route it anew."""
        for transport in self.transports.values():
            self.front.caches.keep(request, transport.arrived_tokens(request))
            transport.give_up(request)
        self._pulling.pop(request, None)
        self._withdraw(request)
        self.num_recomputed += 1
        self._route(request, again=True)

    def _withdraw(self, request: Request) -> None:
        name = self.front.prefills(request)
        if name is not None:
            (self.locals.get(name) or self.remotes[name]).withdraw(request)

    def _route(self, request: Request, *, again: bool) -> None:
        hits = self.front.caches.hits(request)
        found, considered = self.front.route(request, hits, self.clock.now_ns, again=again)
        request.decision = found.decision if request.decision is None else request.decision
        if not again:
            self.roles.came(request, found.decision.num_new_tokens)
        if isinstance(found, Refused):
            refused = found.reason is Refusal.PREDICTED_LATE
            self._end(request, Outcome.REJECTED if refused else Outcome.FAILED)
            return
        request.attempt += 1
        request.routed_at_ns = self.clock.now_ns
        request.num_hit_tokens = found.hit_tokens
        request.num_new_tokens = request.num_prompt_tokens - found.hit_tokens
        if self.copier is not None:
            self.copier.routed(request, found, considered)
        if found.decision.path is Path.REMOTE:
            self._send_away(request, found)
        else:
            self._keep(request, found)

    def _keep(self, request: Request, routed: Routed) -> None:
        job = Job(request, request.attempt, self._local_chunks(request.num_new_tokens))
        if routed.source:
            self._pulling[request] = (routed.prefill, job)
            transport = self.transports[routed.source]
            transport.pull(request, routed.shipped_bytes, routed.present_tokens)
        else:
            self.locals[routed.prefill].submit(job)

    def _pulled(self, request: Request) -> None:
        """The prefix is there that a prefill at home waits for."""
        self.front.landed(request, self.clock.now_ns)
        name, job = self._pulling.pop(request)
        if not self.locals[name].up:
            self.again(request)
            return
        blocks = request.num_hit_tokens // self.setup.blocks.tokens
        self.front.caches.pools[self.setup.name].store(request.block_ids[:blocks])
        self.locals[name].submit(job)

    def _local_chunks(self, num_new_tokens: int) -> list[tuple[int, int]]:
        return [(num_new_tokens, self.setup.costs.local_prefill_ns(num_new_tokens))]

    def _send_away(self, request: Request, routed: Routed) -> None:
        request.offloaded = True
        transport = self.transports[routed.cluster]
        costs, present = transport.cluster.costs, routed.present_tokens
        # As many as the gateway was promised, which knows it only with a plan.
        transport.promise(request, costs.shipped_bytes(request.num_prompt_tokens, present), present)
        chunks = costs.chunks(request.num_new_tokens)
        self.remotes[routed.prefill].submit(Job(request, request.attempt, chunks))

    # Prefill

    def _local_started(self, name: str, job: Job) -> None:
        self._started(job, self.setup.name, name, self._local_chunks)

    def _started(
        self, job: Job, cluster: str, name: str, chunks: Callable[[int], list[tuple[int, int]]]
    ) -> None:
        """A prefill starts: what is cached is looked up again, as engines do."""
        request = job.request
        request.prefill_started_at_ns = self.clock.now_ns
        held, read_ns = self.front.caches.resume(request, cluster, name)
        if held != request.num_hit_tokens or read_ns:
            request.num_hit_tokens = held
            request.num_new_tokens = request.num_prompt_tokens - held
            job.chunks = [
                (tokens, end_ns + read_ns) for tokens, end_ns in chunks(request.num_new_tokens)
            ]

    def _remote_started(self, transport: Transport, name: str, job: Job) -> None:
        self._started(job, transport.cluster.name, name, transport.cluster.costs.chunks)
        transport.start(job.request)
        self.front.choose_decode(job.request)

    def _local_done(self, job: Job) -> None:
        if job.attempt == job.request.attempt:
            job.request.prefilled_at_ns = self.clock.now_ns
            self._store(self.setup.name, job.request)
            self.front.prefilled(job.request, self.clock.now_ns)
            self._decode(job.request)

    def _remote_done(self, cluster: ClusterSetup, job: Job) -> None:
        if job.attempt == job.request.attempt:
            job.request.prefilled_at_ns = self.clock.now_ns
            self.clock.after(cluster.link.rtt_ns // 2, self._heard_of, job)
        self._store(cluster.name, job.request)

    def _heard_of(self, job: Job) -> None:
        """The answer of a prefill leg has crossed the link."""
        if job.attempt == job.request.attempt:
            self.front.prefilled(job.request, self.clock.now_ns)

    def _store(self, pool: str, request: Request) -> None:
        self.front.caches.pools[pool].store(request.block_ids)

    # Link

    def _landed(self, request: Request) -> None:
        self.front.landed(request, self.clock.now_ns)
        self._store(self.setup.name, request)
        self._decode(request)

    def _link_changed(self, cluster: str, alive: bool) -> None:
        news = News.LINK_ALIVE if alive else News.LINK_DEAD
        changed_at_ns = self.transports[cluster].changed_at_ns
        self.front.heard.note(news, changed_at_ns, self.clock.now_ns)
        for index in sorted(self.front.set_link(cluster, up=alive)):
            self.again(self.open[index])

    # Decode and the end

    def _decode(self, request: Request) -> None:
        request.landed_at_ns = self.clock.now_ns
        name = self.front.choose_decode(request)
        decoder = None if name is None else self.decoders[name]
        if decoder is None or not decoder.fits(self._kv_bytes_at_end(request)):
            self._end(request, Outcome.FAILED)
            return
        decoder.submit(request)

    def _first(self, request: Request) -> None:
        self.front.first_token(request, self.clock.now_ns)
        if request.first_token_at_ns == UNSET:
            request.first_token_at_ns = self.clock.now_ns

    def _finished(self, request: Request) -> None:
        self.roles.finished(request)
        self._end(request, Outcome.FINISHED)

    def _end(self, request: Request, outcome: Outcome) -> None:
        request.outcome = outcome
        request.finished_at_ns = self.clock.now_ns
        del self.open[request.index]
        self.front.ended(request, self.clock.now_ns)
        self._arrivals.ended(request)
        if not self.busy:
            self.clock.stop()


def _nothing(_job: Job, _tokens: int) -> None:
    """Chunks matter only where they are shipped."""
