"""One run: requests through prefill, link and decode, on a virtual clock.

    arrive ─► decide ─┬─ LOCAL ──► PD-P queue ─► prefill ───────────────┐
                      └─ REMOTE ─► PrfaaS queue ─► prefill ∥ link ─► landed ─► decode ─► finished
                           a dead link or instance: decide again, attempt + 1

Prefill hands over to decode within the PD cluster at no cost. The first token streams when decode
admits the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prfaas.core.dispatch import Refusal, Refused, Routed
from prfaas.core.routing import Path
from prfaas.sim.caches import PD_POOL, PRFAAS_POOL
from prfaas.sim.clock import Clock
from prfaas.sim.decode import DecodeInstance
from prfaas.sim.failures import schedule
from prfaas.sim.front import Front
from prfaas.sim.prefill import Job, PrefillInstance
from prfaas.sim.request import UNSET, Follower, Outcome, Request
from prfaas.sim.series import Series
from prfaas.sim.setup import Setup
from prfaas.sim.telemetry import Telemetry
from prfaas.sim.transport import Transport

Progress = Callable[[int], None]


class Simulation:
    """A system and its requests.

    Args:
        setup: The system.
        requests: In order of arrival; those that follow others are appended when they come.
        on_progress: Called with the number of requests that have arrived, now and then.
    """

    def __init__(
        self, setup: Setup, requests: Sequence[Request], on_progress: Progress | None = None
    ) -> None:
        self.setup, self.requests = setup, list(requests)
        self.clock = Clock()
        self.front = Front(setup)
        self.open: dict[int, Request] = {}
        self.num_recomputed = 0
        self._on_progress = on_progress
        self.transport = Transport(
            self.clock,
            setup.link,
            setup.costs,
            on_landed=self._landed,
            on_change=self._link_changed,
            told_after_ns=setup.signals.delay_ns,
        )
        self.link = self.transport.link
        self.locals = {n: self._prefill_instance(n) for n in self.front.prefill_names}
        self.remotes = {n: self._prfaas_instance(n) for n in self.front.prfaas_names}
        self.decoders = {n: self._decode_instance(n) for n in self.front.decode_names}
        self._roots = tuple(requests)
        self._next = self._num_expected = 0
        self.telemetry, self.series = Telemetry(self), Series(self)

    def _prefill_instance(self, name: str) -> PrefillInstance:
        return PrefillInstance(
            name,
            self.clock,
            on_start=self._started,
            on_chunk=_nothing,
            on_done=self._local_done,
        )

    def _prfaas_instance(self, name: str) -> PrefillInstance:
        return PrefillInstance(
            name,
            self.clock,
            on_start=self._remote_started,
            on_chunk=self.transport.chunk,
            on_done=self._remote_done,
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
        return self.setup.costs.kv_bytes(request.num_prompt_tokens + request.num_output_tokens)

    def run(self, stop_at_ns: int | None = None) -> None:
        """Run until every request has ended, or until an instant."""
        if self._roots:
            self.clock.at(self._roots[0].arrived_at_ns, self._arrive)
        self.telemetry.start()
        self.series.start()
        schedule(self, self.setup.failures)
        while self.busy:
            if stop_at_ns is not None and self.clock.now_ns >= stop_at_ns:
                break
            if not self.clock.step():
                break

    @property
    def busy(self) -> bool:
        """Whether requests are under way or yet to come."""
        return bool(self.open) or self._next < len(self._roots) or self._num_expected > 0

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self.open)

    # Arrival and dispatch

    def _arrive(self, _argument: None) -> None:
        request = self._roots[self._next]
        self._next += 1
        if self._next < len(self._roots):
            self.clock.at(self._roots[self._next].arrived_at_ns, self._arrive)
        if self._on_progress is not None and self._next % 256 == 0:
            self._on_progress(self._next)
        self._come(request)

    def _come(self, request: Request) -> None:
        self.open[request.index] = request
        self._route(request, again=False)

    def _expect(self, follower: Follower) -> None:
        """A request that waited for another comes later, if there is time for it."""
        if self.clock.now_ns + follower.after_ns < follower.until_ns:
            self._num_expected += 1
            self.clock.after(follower.after_ns, self._follow, follower.request)

    def _follow(self, request: Request) -> None:
        self._num_expected -= 1
        request.arrived_at_ns = self.clock.now_ns
        self.requests.append(request)
        self._come(request)

    def again(self, request: Request) -> None:
        """What a request had is lost: route it anew."""
        self.transport.give_up(request)
        self._withdraw(request)
        decoder = self.front.decoder_of(request)
        if decoder is not None:
            self.decoders[decoder].release(request)
        self.num_recomputed += 1
        self._route(request, again=True)

    def _withdraw(self, request: Request) -> None:
        name = self.front.prefills(request)
        if name is not None:
            (self.locals.get(name) or self.remotes[name]).withdraw(request)

    def _route(self, request: Request, *, again: bool) -> None:
        found = self.front.route(request, self.clock.now_ns, again=again)
        request.decision = found.decision if request.decision is None else request.decision
        if isinstance(found, Refused):
            refused = found.reason is Refusal.PREDICTED_LATE
            self._end(request, Outcome.REJECTED if refused else Outcome.FAILED)
            return
        request.attempt += 1
        request.routed_at_ns = self.clock.now_ns
        request.num_hit_tokens = found.hit_tokens
        request.num_new_tokens = request.num_prompt_tokens - found.hit_tokens
        if found.decision.path is Path.REMOTE:
            self._send_away(request, found)
        else:
            self._keep(request, found)

    def _keep(self, request: Request, routed: Routed) -> None:
        new = request.num_new_tokens
        self.front.caches.use(PD_POOL, request, routed.hit_tokens)
        work_ns = self.setup.costs.local_prefill_ns(new)
        self.locals[routed.prefill].submit(Job(request, request.attempt, [(new, work_ns)]))

    def _send_away(self, request: Request, routed: Routed) -> None:
        request.offloaded = True
        self.transport.promise(request, routed.shipped_bytes, routed.present_tokens)
        self.front.caches.use(PRFAAS_POOL, request, routed.hit_tokens)
        chunks = self.setup.costs.chunks(request.num_new_tokens)
        self.remotes[routed.prefill].submit(Job(request, request.attempt, chunks))

    # Prefill

    def _started(self, job: Job) -> None:
        job.request.prefill_started_at_ns = self.clock.now_ns

    def _remote_started(self, job: Job) -> None:
        self._started(job)
        self.transport.start(job.request)
        decoder = self.front.choose_decode(job.request)
        if decoder is not None:
            self.decoders[decoder].hold(job.request)

    def _local_done(self, job: Job) -> None:
        if job.attempt == job.request.attempt:
            job.request.prefilled_at_ns = self.clock.now_ns
            self.front.prefilled(job.request, self.clock.now_ns)
            self.front.caches.store(PD_POOL, job.request)
            self._decode(job.request)

    def _remote_done(self, job: Job) -> None:
        if job.attempt == job.request.attempt:
            job.request.prefilled_at_ns = self.clock.now_ns
            self.clock.after(self.setup.link.rtt_ns // 2, self._heard_of, job)
        self.front.caches.store(PRFAAS_POOL, job.request)

    def _heard_of(self, job: Job) -> None:
        """The answer of a prefill leg has crossed the link."""
        if job.attempt == job.request.attempt:
            self.front.prefilled(job.request, self.clock.now_ns)

    # Link

    def _landed(self, request: Request) -> None:
        self.front.landed(request)
        self.front.caches.store(PD_POOL, request)
        self._decode(request)

    def _link_changed(self, alive: bool) -> None:
        for index in sorted(self.front.set_link(up=alive)):
            self.again(self.open[index])

    # Decode and the end

    def _decode(self, request: Request) -> None:
        request.landed_at_ns = self.clock.now_ns
        name = self.front.choose_decode(request)
        decoder = None if name is None else self.decoders[name]
        if decoder is None or not decoder.fits(request):
            if decoder is not None:
                decoder.release(request)
            self._end(request, Outcome.FAILED)
            return
        decoder.submit(request)

    def _first(self, request: Request) -> None:
        if request.first_token_at_ns == UNSET:
            request.first_token_at_ns = self.clock.now_ns

    def _finished(self, request: Request) -> None:
        self._end(request, Outcome.FINISHED)

    def _end(self, request: Request, outcome: Outcome) -> None:
        request.outcome = outcome
        request.finished_at_ns = self.clock.now_ns
        del self.open[request.index]
        self.front.ended(request, self.clock.now_ns)
        for follower in request.followers:
            self._expect(follower)


def _nothing(_job: Job, _tokens: int) -> None:
    """Chunks matter only where they are shipped."""
