"""One run: requests through prefill, link and decode, on a virtual clock.

    arrive ─► decide ─┬─ LOCAL ──► PD-P queue ─► prefill ───────────────┐
                      └─ REMOTE ─► PrfaaS queue ─► prefill ∥ link ─► landed ─► decode ─► finished
                           a dead link or instance: decide again, attempt + 1

Prefill hands over to decode within the PD cluster at no cost. The first token streams when decode
admits the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prfaas.core.prefix_cache import PrefixCache
from prfaas.core.routing import Path
from prfaas.sim.balancer import Balancer
from prfaas.sim.clock import Clock
from prfaas.sim.decode import DecodeInstance
from prfaas.sim.failures import schedule
from prfaas.sim.front import Front
from prfaas.sim.link import Flow, SharedLink
from prfaas.sim.prefill import Job, PrefillInstance
from prfaas.sim.request import UNSET, Follower, Outcome, Request
from prfaas.sim.setup import Setup
from prfaas.sim.telemetry import Telemetry

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
        self.num_open = 0
        self.num_recomputed = 0
        self._on_progress = on_progress
        self.link = SharedLink(
            self.clock,
            setup.link.bits_per_s,
            on_landed=self._landed,
            flow_bits_per_s=setup.link.flow_bits_per_s,
            delay_ns=setup.link.rtt_ns // 2,
        )
        self.locals = {n: self._prefill_instance(n, remote=False) for n in self.front.local.names}
        self.remotes = {n: self._prefill_instance(n, remote=True) for n in self.front.remote.names}
        self.decoders = [self._decode_instance(f"d{i:05}") for i in range(setup.num_decode)]
        self.balancer = Balancer(setup.num_decode)
        self.decoder_of: dict[Request, int] = {}
        self._flows: dict[Request, Flow | None] = {}
        self._promised: dict[Request, tuple[int, int]] = {}
        self._roots = tuple(requests)
        self._next = self._num_expected = 0
        self.telemetry = Telemetry(self)

    def _prefill_instance(self, name: str, *, remote: bool) -> PrefillInstance:
        return PrefillInstance(
            name,
            self.clock,
            on_start=self._remote_started if remote else self._started,
            on_chunk=self._remote_chunk if remote else _nothing,
            on_done=self._remote_done if remote else self._local_done,
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
        schedule(self, self.setup.failures)
        while self.busy:
            if stop_at_ns is not None and self.clock.now_ns >= stop_at_ns:
                break
            if not self.clock.step():
                break

    @property
    def busy(self) -> bool:
        """Whether requests are under way or yet to come."""
        return self.num_open > 0 or self._next < len(self._roots) or self._num_expected > 0

    @property
    def num_assigned(self) -> int:
        """Requests that hold a place in a decode instance."""
        return self.balancer.num_assigned

    # Arrival and dispatch

    def _arrive(self, _argument: None) -> None:
        request = self._roots[self._next]
        self._next += 1
        if self._next < len(self._roots):
            self.clock.at(self._roots[self._next].arrived_at_ns, self._arrive)
        if self._on_progress is not None and self._next % 256 == 0:
            self._on_progress(self._next)
        self.num_open += 1
        self._route(request)

    def _expect(self, follower: Follower) -> None:
        """A request that waited for another comes later, if there is time for it."""
        if self.clock.now_ns + follower.after_ns < follower.until_ns:
            self._num_expected += 1
            self.clock.after(follower.after_ns, self._follow, follower.request)

    def _follow(self, request: Request) -> None:
        self._num_expected -= 1
        self.num_open += 1
        request.arrived_at_ns = self.clock.now_ns
        self.requests.append(request)
        self._route(request)

    def _route(self, request: Request) -> None:
        now, prompt = self.clock.now_ns, request.num_prompt_tokens
        hits = self.front.hits(request.block_ids, prompt)
        decision, _ = self.front.decide(prompt, hits, now)
        first = request.decision is None
        request.decision = decision if first else request.decision
        if first and not self.front.admitted(decision, prompt, hits, now):
            self._end(request, Outcome.REJECTED)
            return
        request.attempt += 1
        if decision.path is Path.REMOTE:
            self._send_away(request, hits)
        else:
            self._keep(request, hits)

    def _keep(self, request: Request, hits: tuple[int, int]) -> None:
        name = self.front.local.least()
        if name is None:
            self._end(request, Outcome.FAILED)
            return
        new = request.num_prompt_tokens - hits[0]
        self._note_hit(request, new, hits[0])
        work = self.setup.costs.local_prefill_ns(new)
        self._use(self.front.pd_cache, request, hits[0])
        self.front.local.dispatch(name, self.clock.now_ns, work)
        self.locals[name].submit(Job(request, request.attempt, [(new, work)]))

    def _send_away(self, request: Request, hits: tuple[int, int]) -> None:
        name = self.front.remote.least()
        assert name is not None, "the policy sends nothing away without a ready instance"  # noqa: S101
        prompt, (present, cached) = request.num_prompt_tokens, hits
        costs = self.setup.costs
        self._note_hit(request, prompt - cached, cached)
        request.offloaded = True
        promised = costs.shipped_bytes(prompt, present)
        self._promised[request] = (promised, present)
        self.front.link.promise(promised)
        self._flows[request] = None
        self._use(self.front.prfaas_cache, request, cached)
        job = Job(request, request.attempt, costs.chunks(prompt - cached))
        self.front.remote.dispatch(name, self.clock.now_ns, job.work_ns)
        self.remotes[name].submit(job)

    @staticmethod
    def _note_hit(request: Request, num_new_tokens: int, num_hit_tokens: int) -> None:
        request.num_new_tokens, request.num_hit_tokens = num_new_tokens, num_hit_tokens

    def _use(self, cache: PrefixCache | None, request: Request, hit_tokens: int) -> None:
        if cache is not None and hit_tokens:
            blocks = -(-hit_tokens // self.setup.cache.block_tokens)
            cache.touch(request.block_ids, blocks)

    @staticmethod
    def _store(cache: PrefixCache | None, request: Request) -> None:
        if cache is not None and request.block_ids:
            cache.store(request.block_ids)

    # Prefill

    def _started(self, job: Job) -> None:
        request = job.request
        request.prefill_started_at_ns = self.clock.now_ns

    def _remote_started(self, job: Job) -> None:
        self._started(job)
        request = job.request
        self._flows[request] = self.link.open(request, self._promised[request][0])
        decoder = self._decoder_for(request)
        if decoder is not None:
            decoder.hold(request)

    def _remote_chunk(self, job: Job, tokens: int) -> None:
        request = job.request
        flow = self._flows.get(request)
        if flow is None or job.attempt != request.attempt:
            return
        promised, present = self._promised[request]
        costs = self.setup.costs
        last = tokens == request.num_new_tokens
        end = request.num_prompt_tokens - request.num_new_tokens + tokens
        ready = promised if last else max(0, costs.shipped_bytes(end, present) - costs.state_bytes)
        if last or ready > flow.added_bytes:
            self.link.add(flow, max(0, ready - flow.added_bytes), last=last)

    def _local_done(self, job: Job) -> None:
        if job.attempt == job.request.attempt:
            self._prefilled(job.request)
            self._store(self.front.pd_cache, job.request)
            self._decode(job.request)

    def _remote_done(self, job: Job) -> None:
        if job.attempt == job.request.attempt:
            self._prefilled(job.request)
        self._store(self.front.prfaas_cache, job.request)

    def _prefilled(self, request: Request) -> None:
        request.prefilled_at_ns = self.clock.now_ns

    # Link

    def _landed(self, flow: Flow) -> None:
        request = flow.request
        if flow.attempt != request.attempt:
            return
        self._settle(request)
        self._store(self.front.pd_cache, request)
        self._decode(request)

    def _settle(self, request: Request) -> None:
        """The transfer of a request is over, one way or the other."""
        flow = self._flows.pop(request, None)
        if flow is not None:
            self.link.drop(flow)
        promised, _ = self._promised.pop(request)
        self.front.link.settle(promised)

    def set_link(self, bits_per_s: float) -> None:
        """The capacity changes; a cut that lasts is noticed after a while."""
        self.link.set_rate(bits_per_s)
        if bits_per_s <= 0:
            self.clock.after(self.setup.link.dead_after_ns, self._maybe_dead, self.clock.now_ns)
        else:
            self.clock.after(self.setup.signals.delay_ns, self._alive)

    def _maybe_dead(self, _cut_at_ns: int) -> None:
        if self.link.bits_per_s > 0 or not self.front.link_up:
            return
        self.front.link_up = False
        for request in sorted(self._flows, key=lambda r: r.index):
            self.again(request)

    def _alive(self, _argument: None) -> None:
        self.front.link_up = self.link.bits_per_s > 0

    def again(self, request: Request) -> None:
        """What a request had is lost: route it anew."""
        if request in self._promised:
            self._settle(request)
        index = self.decoder_of.pop(request, None)
        if index is not None:
            self.decoders[index].release(request)
            self.balancer.leave(index)
        self.num_recomputed += 1
        self._route(request)

    # Decode and the end

    def _decoder_for(self, request: Request) -> DecodeInstance | None:
        """The instance that decodes a request, chosen when it is first needed."""
        index = self.decoder_of.get(request)
        if index is None:
            index = self.balancer.choose()
            if index is None:
                return None
            self.decoder_of[request] = index
        return self.decoders[index]

    def _decode(self, request: Request) -> None:
        request.landed_at_ns = self.clock.now_ns
        decoder = self._decoder_for(request)
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
        self.num_open -= 1
        index = self.decoder_of.pop(request, None)
        if index is not None:
            self.balancer.leave(index)
        for follower in request.followers:
            self._expect(follower)


def _nothing(_job: Job, _tokens: int) -> None:
    """Chunks matter only where they are shipped."""
