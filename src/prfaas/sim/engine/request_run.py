"""One request in a run: carries out what the core's machine decides, in virtual time.

The twin of the gateway's (`gateway/serving/request_run.py`): there a leg is a POST, here it is a
job at an instance; a timer is an event of the clock. What a pool or an engine does by itself
happens here too: a transfer that is aborted leaves what has arrived, and an instance that decodes
waits for blocks that are in transit, and computes what does not come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from prfaas.core.dispatch.types import Routed
from prfaas.core.request import actions
from prfaas.core.request.blocks import Movement, told_of_link
from prfaas.core.request.driver import Executor
from prfaas.core.request.events import (
    AnyEvent,
    Begun,
    Blocks,
    DecodeFailure,
    DecodeWarmed,
    EngineBroke,
    Finished,
    FirstToken,
    Outcome,
    PrefillDone,
    PrefillFailed,
    PrefillFailure,
    Stopped,
    TransferEnded,
    Woke,
)
from prfaas.core.request.fleet import SharedState
from prfaas.core.request.held import life_of
from prfaas.core.request.machine import Route
from prfaas.core.request.states import Stage
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.core.resilience.quarantine import Guards
from prfaas.core.routing.decision import Path
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.sim.engine.dispatch_driver import SimulatedDriver
from prfaas.sim.engine.reactions import Reactions, SimulatedSuspects
from prfaas.sim.engine.relays import SimulatedRelay
from prfaas.sim.resources.decode_instance import DecodeInstance
from prfaas.sim.resources.prefill_instance import PrefillInstance, PrefillJob
from prfaas.sim.resources.transport import Transport
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import UNSET, Request
from prfaas.sim.system.setup import Setup

BEGUN, _PREFILL_DONE, _FIRST_TOKEN, _WOKE = Begun(), PrefillDone(), FirstToken(), Woke()
_COMMITTED = {blocks: TransferEnded(blocks, TransferEnd.COMMITTED) for blocks in Blocks}
_ALL = 2**62
_FOUND_ALL = Finished(_ALL, _ALL)
_PREFILLING, _ENDED = Stage.PREFILLING, Stage.ENDED
_REMOTE, _GOOD, _LANDED = Path.REMOTE, BreakerOutcome.GOOD, TransferEnd.COMMITTED
_HAND_OFF, _PULL = Blocks.HAND_OFF, Blocks.PULL

_SPAN_BITS = 31
"""A span is 2.1 s."""


class Alarms:
    """Wakes requests. Few wait for that to the end: so one event serves all alarms of a span of
    time, and only those that are of use still when it begins enter the clock's heap."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: dict[int, list[tuple[int, SimulatedRequestRun]]] = {}

    def set(self, at_ns: int, run: SimulatedRequestRun) -> None:
        """Wake a request at an instant."""
        span = at_ns >> _SPAN_BITS
        if span == self._clock.now_ns >> _SPAN_BITS:
            self._clock.at(at_ns, run.wake, at_ns)
        elif (waiting := self._spans.get(span)) is not None:
            waiting.append((at_ns, run))
        else:
            self._spans[span] = [(at_ns, run)]
            self._clock.at(span << _SPAN_BITS, self._begin, span)

    def _begin(self, span: int) -> None:
        for at_ns, run in self._spans.pop(span):
            if run.waits_for(at_ns):
                self._clock.at(at_ns, run.wake, at_ns)


class RunParts(ABC):
    """A run in progress: its parts, as used by requests, signals, loops and failures."""

    setup: Setup
    clock: Clock
    alarms: Alarms
    front: SimulatedDriver
    guards: Guards
    fleet: SharedState
    """State that the machines of all requests share."""
    reactions: Reactions
    """Counts of what was done about failures."""
    suspects: SimulatedSuspects
    open: dict[int, SimulatedRequestRun]
    """Requests under way, by index."""
    transports: dict[tuple[str, str], Transport]
    """Links by their two pools."""
    wans: dict[str, list[Transport]]
    """Links to the PD cluster by PrfaaS cluster."""
    locals: dict[str, PrefillInstance]
    """Prefill instances of the PD cluster, by name."""
    remotes: dict[str, PrefillInstance]
    """Prefill instances of the PrfaaS clusters, by name."""
    decoders: dict[str, DecodeInstance]
    """Decode instances, by name."""
    is_early: bool
    """Instances that prefill give first tokens."""
    may_relay: bool
    """They go on until the blocks have arrived."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Return True while requests are under way or yet to come."""

    @abstractmethod
    def lane(self, name: str) -> PrefillInstance:
        """Prefill on a decode instance."""

    @abstractmethod
    def ended(self, run: SimulatedRequestRun) -> None:
        """A request is over."""

    def prefill_instance(self, name: str) -> PrefillInstance:
        """An instance that prefills."""
        return self.locals.get(name) or self.remotes[name]

    def keep_what_came(self, request: Request, transport: Transport) -> None:
        """Keep the blocks of a request that have arrived so far."""
        arrived_tokens = transport.arrived_tokens(request)
        self.front.caches.keep(request, transport.ends[1], arrived_tokens)

    def chunks(self, num_new_tokens: int, prefix_tokens: int) -> list[tuple[int, int]]:
        """Chunks of a prefill in the PD cluster after a cached prefix: tokens and end, ns."""
        prefill_ns = self.setup.costs.local_prefill_ns
        return [(num_new_tokens, prefill_ns(num_new_tokens, prefix_tokens))]


class _Passive(Executor):
    """Actions that need nothing done here."""

    __slots__ = ()

    def _await_blocks(self, action: actions.AwaitBlocks) -> None:
        """Engines wait for blocks here."""

    def _release(self, action: actions.Release) -> None:
        """Pools forget what no request waits for."""

    def _fail(self, action: actions.Fail) -> None:
        """The outcome tells of a failure."""


class SimulatedRequestRun(_Passive):
    """Carries out the actions for one request."""

    __slots__ = (
        "_do",
        "_events",
        "_found_tokens",
        "_is_reporting",
        "_parts",
        "_waits_for",
        "decoder",
        "life",
        "relay",
        "request",
        "routed",
        "wakes_at_ns",
    )

    def __init__(self, parts: RunParts, request: Request, routed: Routed) -> None:
        self._parts, self.request, self._do = parts, request, self.methods
        self.routed = routed
        self.request.resume_after(routed.hit_tokens, self._parts.clock.now_ns)
        pools = routed.prefill_pool, routed.destination
        # Where instances only decode, one is chosen once it is needed.
        decode = routed.decode or ""
        prefill = "" if routed.prefill == decode else routed.prefill
        route = Route(request.index, routed, decode, prefill, pools, request.num_prompt_tokens)
        if parts.may_relay:
            route.relay_max = request.num_output_tokens - 1
            if routed.ships:
                transport = self._transport(Blocks.HAND_OFF)
                route.num_bytes = self._num_bytes(Blocks.HAND_OFF, transport)
        self.life = life_of(route, parts.fleet)
        self.decoder = ""
        """Instance that has the request to decode."""
        self._found_tokens = _ALL
        self._waits_for: Movement | None = None
        """Blocks that a leg waits for."""
        self.relay: SimulatedRelay | None = None
        """The part of the answer that the instance which prefills makes; None without one."""
        self._is_reporting = False
        self._events: list[AnyEvent] = []
        """Events that came up while another one was reported."""
        self.wakes_at_ns: int | None = None
        """Time of the machine's next alarm."""

    # Events and actions

    def report(self, event: AnyEvent) -> None:
        """Execute the actions of an event; events that occur meanwhile follow."""
        if self._is_reporting:
            self._events.append(event)
            return
        self._is_reporting, life, now_ns = True, self.life, self._parts.clock.now_ns
        for action in life.step(event, now_ns):
            self._do[type(action)](self, action)
        while self._events:
            for action in life.step(self._events.pop(0), now_ns):
                self._do[type(action)](self, action)
        self._is_reporting = False
        if life.stage is _ENDED:
            self._parts.ended(self)
        elif self._waits_for is not None and not self._waits_for.is_coming:
            self._waits_for = None
            if life.stage is _PREFILLING:
                self._prefill()
            else:
                self._compute()

    def _start_pull(self, _: actions.StartPull) -> None:
        routed = self._on_route()
        transport = self._transport(_PULL)
        num_bytes = self._num_bytes(_PULL, transport)
        transport.pull(self.request, num_bytes, routed.prefill_pool_tokens)

    def _start_prefill(self, action: actions.StartPrefill) -> None:
        parts, self.relay = self._parts, None
        self._on_route()
        if num_tokens := action.relay_tokens:
            self.relay = SimulatedRelay(parts.clock, parts.setup, self.request, num_tokens)
        if parts.guards.unsettled:
            parts.guards.began(action.engine, parts.clock.now_ns)
        pull = self.life.blocks.pull
        if pull is not None and pull.is_coming:
            self._waits_for = pull
        else:
            self._prefill()

    def _on_route(self) -> Routed:
        """The route; another one than before if the prefill was given up."""
        if self.life.route.routed is not self.routed:
            self.routed = self.life.route.routed
            self.request.resume_after(self.routed.hit_tokens, self._parts.clock.now_ns)
        return self.routed

    def _stop_prefill(self, _: actions.StopPrefill) -> None:
        parts, name = self._parts, self.routed.prefill
        if self.relay is not None and self.relay.has_begun:
            self.relay.end()
            return
        parts.prefill_instance(name).withdraw(self.request)
        self.request.attempt += 1
        self._waits_for = None
        parts.guards.ended(name, BreakerOutcome.NOTHING, parts.clock.now_ns)

    def _warm_decode(self, _: actions.WarmDecode) -> None:
        if self.relay is not None:
            self.relay.warm(lambda: self.report(DecodeWarmed()))

    def _hold_back(self, action: actions.HoldBack) -> None:
        self._parts.suspects.killed(self.request.index, action.engine)

    def _continue_on(self, action: actions.ContinueOn) -> None:
        self.decoder = ""
        start = actions.StartDecode(action.engine)
        self._parts.clock.after(action.after_ns, self._start_decode, start)

    def _abort(self, action: actions.Abort) -> None:
        """Keep blocks that have arrived."""
        transport = self._transport(action.blocks)
        self._parts.keep_what_came(self.request, transport)
        transport.give_up(self.request)

    def _transport(self, which: Blocks) -> Transport:
        """The link of blocks in transit."""
        routed = self.routed
        is_pull = which is _PULL
        ends = routed.pull_link if is_pull else (routed.prefill_pool, routed.destination)
        return self._parts.transports[ends]

    def _fell_back(self, action: actions.FellBack) -> None:
        self._parts.reactions.fell_back(self.request.index, action)

    def _retry(self, action: actions.Retry) -> None:
        self._parts.reactions.retried(is_allowed=action.is_allowed)

    def _wake_at(self, action: actions.WakeAt) -> None:
        self.wakes_at_ns = action.at_ns
        self._parts.alarms.set(action.at_ns, self)

    def waits_for(self, at_ns: int) -> bool:
        """Return True if the machine's alarm at an instant is of use still."""
        return at_ns == self.wakes_at_ns and len(self.life.watches) > 0

    def wake(self, at_ns: int) -> None:
        """The instant of an alarm has come."""
        if self.waits_for(at_ns):
            self.wakes_at_ns = None
            self.report(_WOKE)

    # The prefill leg

    def _prefill(self, sent_as: int | None = None) -> None:
        """Queue the prompt at the instance that prefills, once it has crossed the link that its
        blocks take, if they take one.

        Args:
            sent_as: Attempt whose prompt has crossed it; None if it is yet to be sent.
        """
        request, routed, parts = self.request, self.routed, self._parts
        if sent_as is not None and sent_as != request.attempt:
            return
        is_remote = routed.decision.path is _REMOTE
        instance = parts.prefill_instance(routed.prefill)
        if not instance.up:
            self.prefill_failed(may_have_died=False)
            return
        num_new_tokens, held, transport = request.num_new_tokens, request.num_hit_tokens, None
        if routed.ships:
            transport = self._transport(_HAND_OFF)
            if transport.setup.rtt_ns and sent_as is None:
                parts.clock.after(transport.setup.rtt_ns // 2, self._prefill, request.attempt)
                return
            num_bytes = self._num_bytes(_HAND_OFF, transport)
            transport.promise(request, num_bytes, routed.present_tokens)
            chunks = transport.costs.chunks(num_new_tokens, held, is_local=not is_remote)
        else:
            chunks = parts.chunks(num_new_tokens, held)
        if is_remote:
            request.offloaded = True
        instance.submit(PrefillJob(request, request.attempt, chunks, transport))

    def _num_bytes(self, which: Blocks, transport: Transport) -> int:
        """Bytes of blocks that the route moves; the gateway knows what its plan has for them."""
        routed, length = self.routed, self.request.num_prompt_tokens
        if which is _HAND_OFF:
            return transport.costs.shipped_bytes(length, routed.present_tokens)
        return transport.costs.shipped_bytes(routed.hit_tokens, routed.prefill_pool_tokens)

    def prefilled(self) -> None:
        """The answer of the prefill leg has come."""
        parts, routed = self._parts, self.routed
        parts.guards.ended(routed.prefill, _GOOD, parts.clock.now_ns)
        if routed.pulled_from and routed.pulls_from_host:
            span = parts.setup.blocks.tokens
            copied = slice(routed.prefill_pool_tokens // span, routed.hit_tokens // span)
            copies = self.request.block_ids[copied]
            parts.front.caches.pools[routed.prefill_pool].demote(copies)
        request = self.request
        if parts.is_early and request.first_token_at_ns == UNSET:
            request.first_token_at_ns, request.had_tokens = parts.clock.now_ns, 1
            if request.num_output_tokens == 1:
                request.landed_at_ns = parts.clock.now_ns
                self.report(Finished(request.num_hit_tokens, request.num_hit_tokens))
                return
            if self.relay is not None:
                self.relay.begin()
            self.report(_FIRST_TOKEN)
            if self.relay is not None and self.life.stage is Stage.RELAYING:
                self.relay.go_on(self._relayed)
                return
        self.report(_PREFILL_DONE)

    def _relayed(self) -> None:
        """The instance that prefilled has made all tokens that it was asked for."""
        request = self.request
        if request.had_tokens < request.num_output_tokens:
            self.report(_PREFILL_DONE)
            return
        request.landed_at_ns = self._parts.clock.now_ns
        self.report(Finished(request.num_hit_tokens, request.num_hit_tokens))

    def prefill_failed(self, *, may_have_died: bool) -> None:
        """The instance that prefills died, or is not there."""
        parts, name = self._parts, self.routed.prefill
        parts.guards.ended(name, BreakerOutcome.FAILED, parts.clock.now_ns)
        parts.front.set_ready(name, ready=False, now_ns=parts.clock.now_ns)
        why = f"{name} is down"
        self.report(PrefillFailed(PrefillFailure.UNREACHABLE, may_have_died, why=why))

    # Blocks in transit

    def transfer_ended(self, which: Blocks, kind: TransferEnd, transport: Transport) -> None:
        """Blocks of the request have landed, or can not."""
        parts = self._parts
        parts.guards.ended(transport.ends, told_of_link(kind), parts.clock.now_ns)
        if kind is _LANDED:
            # Nothing is learnt from bytes that are those of the plan.
            is_planned = transport.setup.planned_bytes_ratio == 1.0
            event = _COMMITTED[which]
            if not is_planned:
                event = replace(event, num_bytes=self._num_bytes(which, transport))
            self.report(event)
            return
        self._parts.keep_what_came(self.request, transport)
        transport.give_up(self.request)
        self.report(TransferEnded(which, kind))

    def link_lost(self, transport: Transport) -> None:
        """A link is dead that blocks of the request were to take."""
        for which in Blocks:
            blocks = self.life.blocks.get(which)
            if blocks is not None and blocks.link == transport.ends:
                self.transfer_ended(which, TransferEnd.LINK_LOST, transport)

    # The decode leg

    def _start_decode(self, action: actions.StartDecode) -> None:
        """Decode on an instance, once the blocks that it waits for have come or can not."""
        parts, life, name = self._parts, self.life, action.engine
        self.decoder, decoder = name, parts.decoders[name]
        if parts.guards.unsettled:
            parts.guards.began(name, parts.clock.now_ns)
        if not decoder.up:
            self.broke(had_request=False)
            return
        if not decoder.fits(self.request.num_prompt_tokens + self.request.num_output_tokens):
            parts.guards.ended(name, BreakerOutcome.NOTHING, parts.clock.now_ns)
            self.report(Stopped(Outcome.FAILED))
            return
        which = life.awaited
        blocks = None if which is None else life.blocks.get(which)
        if blocks is not None and blocks.is_coming:
            self._waits_for = blocks
            if parts.setup.routing.transfer_timeout_ns is not None:
                timeout_ns = parts.setup.routing.transfer_timeout_ns
                parts.clock.after(timeout_ns, self._has_waited, blocks)
        else:
            self._compute()

    def _has_waited(self, blocks: Movement) -> None:
        """The engine waits no longer for blocks that are in transit."""
        if self._waits_for is blocks:
            self._waits_for = None
            self._parts.keep_what_came(self.request, self._parts.transports[blocks.link])
            self._compute()

    def _compute(self) -> None:
        """Decode, after computing what is missing of the prompt and of what the client has."""
        request, parts = self.request, self._parts
        hand_off = self.life.blocks.hand_off
        if (
            hand_off is not None
            and hand_off.is_open
            and (hand_off.end is _LANDED or not hand_off.crosses_link)
            and hand_off.destination == parts.front.pool_of[self.decoder]
        ):
            request.landed_at_ns = parts.clock.now_ns
            parts.decoders[self.decoder].submit(request)
            return
        # The instance that decodes computes what has not arrived.
        front = parts.front
        self._found_tokens = front.caches.hits(request).get(front.pool_of[self.decoder], 0)
        self.request.resume_after(self._found_tokens, self._parts.clock.now_ns)
        parts.reactions.num_recomputed += self.decoder != self.routed.prefill
        num_new_tokens = request.num_new_tokens + request.had_tokens
        chunks = parts.chunks(num_new_tokens, request.num_hit_tokens)
        parts.lane(self.decoder).submit(PrefillJob(request, request.attempt, chunks))

    def computed(self) -> None:
        """The instance that decodes has computed what was missing."""
        request, now_ns = self.request, self._parts.clock.now_ns
        request.prefilled_at_ns = request.landed_at_ns = now_ns
        self._parts.decoders[self.decoder].submit(request)

    def first_token(self) -> None:
        """Decode has admitted the request and streams its first token."""
        request = self.request
        if request.first_token_at_ns == UNSET:
            request.first_token_at_ns = self._parts.clock.now_ns
        elif self.life.is_begun and request.second_token_at_ns == UNSET:
            request.second_token_at_ns = self._parts.clock.now_ns
        if self._parts.suspects.are_there:
            self._parts.suspects.left(request.index, is_cleared=True)
        self.report(_FIRST_TOKEN)

    def finished(self) -> None:
        """All tokens are there."""
        parts, found = self._parts, _FOUND_ALL
        parts.guards.ended(self.decoder, _GOOD, parts.clock.now_ns)
        if self._found_tokens != _ALL or self.life.blocks.pull is not None:
            found = Finished(self._found_tokens, self.request.num_hit_tokens)
        self.report(found)

    def broke(self, *, had_request: bool) -> None:
        """The instance that decodes died, or is not there."""
        parts, name = self._parts, self.decoder
        self.decoder, self._waits_for = "", None
        parts.guards.ended(name, BreakerOutcome.FAILED, parts.clock.now_ns)
        is_broken = had_request and self.life.stage is Stage.STREAMING
        if not is_broken:
            # A stream that breaks does not tell why; one that is not answered does.
            parts.front.set_ready(name, ready=False, now_ns=parts.clock.now_ns)
        kind = DecodeFailure.BROKEN if is_broken else DecodeFailure.UNREACHABLE
        self.report(EngineBroke(kind, had_request, why=f"{name} is down"))
