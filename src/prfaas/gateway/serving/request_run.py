"""One request in the gateway: carries out what the core's machine decides, over HTTP and messages.

The machine (`core/request`) gets every event with the time. Actions that take no time are done at
once; a leg runs until its engine's answer is an event, or until the machine ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from prfaas.core.facts import FactStream
from prfaas.core.request import actions
from prfaas.core.request.driver import Executor
from prfaas.core.request.events import (
    AnyEvent,
    Begun,
    Blocks,
    DecodeFailure,
    EngineBroke,
    Finished,
    FirstToken,
    Outcome,
    PrefillDone,
    PrefillFailed,
    PrefillFailure,
    PullNotAsked,
    Stopped,
    TurnCame,
    Woke,
)
from prfaas.core.request.fleet import SharedState
from prfaas.core.request.held import life_of
from prfaas.core.request.machine import RequestLife
from prfaas.core.request.states import Stage
from prfaas.core.routing.decision import Path
from prfaas.errors import EngineError
from prfaas.gateway.admission.engine_slots import Holding, SlotTurn
from prfaas.gateway.admission.quarantine import PromptQuarantine
from prfaas.gateway.engines.engine import (
    INTERNAL_ERROR,
    Engine,
    EngineUnreachableError,
    SuspectError,
)
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.http.errors import UnavailableError
from prfaas.gateway.http.json_codec import from_json
from prfaas.gateway.http.responses import WaitingStream
from prfaas.gateway.openai.continuing import (
    is_greedy,
    stop_strings,
    why_not_early,
    why_not_relay,
    why_one_engine,
)
from prfaas.gateway.routing.transfer_tracker import BlocksReceived
from prfaas.gateway.serving.decode_leg import (
    BROKEN,
    DecodeLeg,
    LegBrokenError,
    StreamHandover,
    refuse,
)
from prfaas.gateway.serving.first_token import EarlyToken
from prfaas.gateway.serving.prefill_leg import (
    Movers,
    MovingBlocks,
    PrefillGivenUpError,
    PrefillLeg,
    Rehearsal,
)
from prfaas.gateway.serving.request_state import (
    Exchange,
    OtherTextError,
    StreamedAnswer,
    reply_headers,
)
from prfaas.gateway.serving.routing_step import Planner, RoutedPrompt
from prfaas.gateway.serving.warm_leg import WarmLeg
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import trouble
from prfaas.logs import log_event
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_S

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestServices:
    """Services that execute the actions of all requests."""

    holding: Holding
    """Holds back what engines would only queue."""
    planner: Planner
    fleet: SharedState
    """State that the machines of all requests share."""
    engines: Engines
    prefill_leg: PrefillLeg
    decode_leg: DecodeLeg
    ending: StreamHandover
    """Ends and continues streams that engines left."""
    movers: Movers
    rehearsal: Rehearsal
    suspects: PromptQuarantine
    """Keep prompts that break engines from further ones."""
    facts: FactStream
    metrics: GatewayMetrics
    stream_head_s: float
    """A stream without a token by then gets its head, seconds."""
    stream_comment_s: float
    """Time between two comments of such a stream, seconds."""


class Legs:
    """Runs the legs of one request."""

    def __init__(
        self,
        parts: RequestServices,
        exchange: Exchange,
        plan: RoutedPrompt,
        life: RequestLife,
        moving: MovingBlocks,
    ) -> None:
        self._parts, self._exchange, self._plan = parts, exchange, plan
        self._life, self._moving = life, moving
        self._report: Callable[[AnyEvent], None] = lambda _: None
        self._first_token: Callable[[], None] | None = None
        self._prefilling: asyncio.Task[int | web.StreamResponse] | None = None
        self._broken: EngineError | None = None
        """Reason for the end of the last decode leg."""
        self._left = exchange.client, plan.prompt
        """Rest of the request, and all tokens so far."""

    def begin(self, report: Callable[[AnyEvent], None], first_token: Callable[[], None]) -> None:
        """Report events from here on, and the first output of each decode leg."""
        self._report, self._first_token = report, first_token

    def close(self) -> None:
        """The request is over: refer to nobody who reports."""
        self._report, self._first_token, self._broken = lambda _: None, None, None
        self._exchange.on_first_token = None

    def stop_prefill(self) -> None:
        """End the prefill leg."""
        if self._prefilling is not None:
            self._prefilling.cancel()

    def is_over_with(self, engine: Engine) -> bool:
        """Return True if the prefill leg on `engine` gives all that the answer can have."""
        return (
            self._num_left == 1 and not self._why_not_early(engine) and not self._plan.route.holds
        )

    @property
    def _num_left(self) -> int:
        """Most tokens that the answer can have."""
        decode = self._life.decode or self._plan.route.decode
        return _num_tokens_max(self._parts, self._exchange, self._plan, decode)

    def _why_not_early(self, engine: Engine) -> str:
        return _why_not_early(self._parts.prefill_leg, engine, self._exchange)

    def _early(self, engine: Engine, relay_tokens: int) -> EarlyToken | None:
        """Taker of the first tokens, if the prefill leg on `engine` may give them."""
        exchange = self._exchange
        if exchange.answer is not None:
            return None
        exchange.record.early(why_not := self._why_not_early(engine))
        if why_not:
            return None
        client, num_tokens = exchange.client, 1 + relay_tokens
        answer = StreamedAnswer(stop_strings(client), is_greedy=is_greedy(client))
        began_ns = time.monotonic_ns()

        def on_token() -> None:
            if relay_tokens:
                # A leg that is stopped does not report what it found.
                exchange.usage.cached_max = self._plan.routed.hit_tokens
                exchange.record.prefilled(time.monotonic_ns() - began_ns)
            self._report(FirstToken())
            if relay_tokens and self._life.stage is not Stage.RELAYING:
                exchange.record.relay.why_not = "its engine is busy, or the blocks come soon"

        return EarlyToken(exchange, answer, num_tokens, num_tokens >= self._num_left, on_token)

    async def prefill(self, engine: Engine, relay_tokens: int) -> web.StreamResponse | None:
        """Run the prefill leg, unless decode would refuse the request; the answer, if the leg made
        all of it."""
        exchange, plan = self._exchange, self._plan
        # Until the leg has answered: what decode's pool or a pull to it brings.
        routed = plan.routed
        is_there = routed.pulls and not routed.ships
        exchange.usage.cached_max = routed.hit_tokens if is_there else routed.present_tokens
        if await self._parts.rehearsal.is_refused(exchange, plan):
            why = "the decode engine refuses its fields"
            self._report(PrefillFailed(PrefillFailure.REFUSED, why=why))
            return None
        if self._life.stage is not Stage.PREFILLING:
            return None
        transfer = None
        if not self.is_over_with(engine):
            transfer = self._moving.open(Blocks.HAND_OFF, *plan.route.pools)
            self._moving.expect(plan)
            if plan.route.holds and (why_not := self._moving.follow(plan, transfer)):
                why = f"{transfer.destination} is not asked to fetch the blocks: {why_not}"
                self._report(PrefillFailed(PrefillFailure(why_not), why=why))
                return None
        exchange.record.prefill_on(engine.name)
        headers, early = exchange.leg_headers("p"), self._early(engine, relay_tokens)
        run = self._parts.prefill_leg.run(
            plan, engine, transfer, headers, self._moving.get(self._life.awaited), early
        )
        started_ns = time.monotonic_ns()
        leg = self._prefilling = asyncio.create_task(run)
        try:
            await asyncio.wait({leg})
        finally:
            self._prefilling = None
            await cancel_all([leg])
        has_relayed = early is not None and relay_tokens > 0 and exchange.answer is early.answer
        if early is not None and has_relayed:
            exchange.record.relay.num_tokens = len(early.answer.token_ids) - 1
        else:
            exchange.record.prefilled(time.monotonic_ns() - started_ns)
        if (answer := await self._ended(leg)) is not None:
            return answer
        event = None if leg.cancelled() else self._prefilled(leg)
        if event is not None and transfer is None and not self.is_over_with(engine):
            # The engine takes prompts alone: it prefills for a decode leg.
            return await self.prefill(engine, relay_tokens)
        is_left = self._life.stage in (Stage.DECODING,) and not has_relayed
        if event is not None:
            self._report(event)
        elif is_left and not exchange.record.fallback:
            log_event(_log, logging.WARNING, "prefill_unanswered", engine=engine.name)
        return None

    async def _ended(
        self, leg: asyncio.Task[int | web.StreamResponse]
    ) -> web.StreamResponse | None:
        """The answer, if a prefill leg gave all of it."""
        found = None if leg.cancelled() or leg.exception() else leg.result()
        if isinstance(found, web.StreamResponse):
            return found
        if not self._exchange.is_answered:
            return None
        return await self._parts.ending.end(self._exchange, self._plan)

    def _prefilled(self, leg: asyncio.Task[int | web.StreamResponse]) -> AnyEvent:
        # Raised here, an error would refer to the request by this frame.
        error = leg.exception()
        if isinstance(error, PrefillGivenUpError):
            is_suspect = isinstance(error, SuspectError)
            return PrefillFailed(error.kind, error.may_have_died, is_suspect, str(error))
        if isinstance(found := leg.result(), int):
            self._exchange.usage.cached_max = found
        return PrefillDone()

    async def decode(self, engine: Engine) -> web.StreamResponse | None:
        """Run the first decode leg; the answer, if it gave one."""
        exchange = self._exchange
        exchange.record.decode_on(engine.name)
        may_continue = exchange.client.stream and not why_one_engine(exchange.client)
        if self._parts.decode_leg.has_others and may_continue:
            exchange.answer = StreamedAnswer(stop_strings(exchange.client))
        return await self._run_decode(engine)

    async def continue_on(self, engine: Engine, after_ns: int) -> web.StreamResponse | None:
        """Run the rest of the request on another engine."""
        exchange = self._exchange
        if after_ns:
            await asyncio.sleep(after_ns / NS_PER_S)
        exchange.record.decode_on(engine.name)
        if exchange.answer is not None and exchange.answer.again():
            self._left = exchange.client, self._plan.prompt
        elif exchange.stream.has_begun or exchange.has_tokens:
            self._left = await self._parts.ending.seam(exchange, self._plan)
            # The end of a relay may be a part of a character.
            relay, num_moved = exchange.record.relay, exchange.usage.num_moved
            relay.num_tokens = max(0, min(relay.num_tokens, num_moved - 1))
            if exchange.is_answered:
                return await self._parts.ending.end(exchange, self._plan)
        return await self._run_decode(engine)

    async def _run_decode(self, engine: Engine) -> web.StreamResponse | None:
        exchange = self._exchange
        exchange.on_first_token = self._first_token
        try:
            answer = await self._parts.decode_leg.run(
                engine, exchange, *self._left, self._moving.get(self._life.awaited)
            )
        except OtherTextError:
            self._left = await self._parts.ending.seam(exchange, self._plan)
            return await self._run_decode(engine)
        except (EngineUnreachableError, LegBrokenError) as error:
            self._broken, answer = error, None
            if not exchange.is_answered:
                self._report(self._broke(error))
                return None
        return answer or await self._parts.ending.end(exchange, self._plan)

    def _broke(self, error: EngineError) -> EngineBroke:
        exchange, kind = self._exchange, DecodeFailure.UNREACHABLE
        if isinstance(error, LegBrokenError):
            kind = DecodeFailure(error.reason)
        return EngineBroke(
            kind,
            may_have_died=_may_have_died(error),
            is_suspect=isinstance(error, SuspectError),
            can_continue=not exchange.stream.has_begun or exchange.answer is not None,
            why=str(error),
        )

    async def give_up(self) -> web.StreamResponse:
        """End without another engine: report the engine's error, or its loss.

        Raises:
            UnavailableError: Nothing has reached the client.
            EngineError: Something has.
        """
        exchange, error = self._exchange, self._broken
        exchange.record.ended(Outcome.FAILED)
        if exchange.stream.has_begun and error is not None:
            if isinstance(error, LegBrokenError) and error.reason == "error":
                return await exchange.stream.fail(from_json(error.body))
            raise error
        if isinstance(error, LegBrokenError) and error.reason in ("status_5xx", "error"):
            return await refuse(error, exchange)
        raise UnavailableError(f"{error}; no other engine can take the request")


def _num_tokens_max(
    parts: RequestServices, exchange: Exchange, plan: RoutedPrompt, decode: str
) -> int:
    """Most tokens that an answer can have, by its request and by the engine that decodes."""
    max_tokens = exchange.client.max_tokens
    room = max(1, parts.engines.by_name[decode].max_model_len - plan.prompt.num_tokens)
    return room if max_tokens is None else min(max_tokens, room)


def _why_not_early(leg: PrefillLeg, engine: Engine, exchange: Exchange) -> str:
    """Reason why the token of a prefill leg is nobody's; empty if it is the client's."""
    if leg.limits.early_first_token == "off":  # noqa: S105 (no password)
        return "off"
    if not leg.takes_sampling(engine):
        return f"{engine.name} refuses the fields of clients"
    return why_not_early(exchange.client)


def _relay_max(parts: RequestServices, exchange: Exchange, plan: RoutedPrompt) -> int:
    """Most tokens that a prefill leg may make of an answer after the first one."""
    leg, route = parts.prefill_leg, plan.route
    if plan.routed.decision.path is not Path.REMOTE or route.holds:
        return 0
    engine = parts.engines.by_name[route.prefill]
    why_not = why_not_relay(exchange.client, leg.limits.relay_decode)
    why_not = why_not or _why_not_early(leg, engine, exchange)
    exchange.record.relay.why_not = why_not
    room = engine.max_model_len - plan.prompt.num_tokens
    num_left = _num_tokens_max(parts, exchange, plan, route.decode)
    return 0 if why_not else max(0, min(num_left, room) - 1)


def _may_have_died(error: EngineError) -> bool:
    """Return True if an engine had a request, and may have died of it."""
    if isinstance(error, EngineUnreachableError):
        return error.had_request
    return isinstance(error, LegBrokenError) and error.status in (INTERNAL_ERROR, BROKEN)


class RequestRun(Executor):
    """Carries out the actions for one request."""

    def __init__(
        self, parts: RequestServices, exchange: Exchange, plan: RoutedPrompt, turn: SlotTurn
    ) -> None:
        self._parts, self._exchange, self._plan, self._turn = parts, exchange, plan, turn
        if plan.layout is not None:
            exchange.usage.cache_end = plan.layout.last_whole_block(plan.prompt.num_tokens)
        plan.route.relay_max = _relay_max(parts, exchange, plan)
        plan.route.num_bytes = MovingBlocks.num_bytes(plan)
        self.life = life_of(plan.route, parts.fleet)
        self._events: list[AnyEvent] = []
        """Events that are being reported; the first one's actions are being done."""
        self._moving = MovingBlocks(parts.movers, exchange, self._report)
        self._warm_leg = WarmLeg(parts.prefill_leg, plan)
        self._legs = Legs(parts, exchange, plan, self.life, self._moving)
        self._next: Callable[[], Awaitable[web.StreamResponse | None]] = self._legs.give_up
        """The leg, or what comes instead of one, that the machine asked for last."""
        self._stepped: asyncio.Event | None = None
        """Set by each step, for a request that waits for blocks."""
        self._timer: asyncio.TimerHandle | None = None
        self._suspicion: bytes | None = None
        """Digest of the prompt while it runs as one after which an engine died."""

    async def answer(self) -> web.StreamResponse:
        """Lead the request to its answer.

        Raises:
            UnavailableError: No engine could take it.
            EngineError: An engine broke after its answer had begun.
        """
        exchange, plan = self._exchange, self._plan
        self._legs.begin(self._report, self._first_token)
        exchange.on_finished = self._finished
        waiting = self._waiting_stream()
        try:
            self._suspicion = await self._parts.suspects.enter(plan.prompt)
            self._report(Begun())
            while True:
                found = await self._next()
                if found is not None:
                    return found
        except EngineError:
            exchange.record.ended(Outcome.FAILED)
            raise
        finally:
            if waiting is not None:
                await waiting.close()
            self._close()

    def _waiting_stream(self) -> WaitingStream | None:
        """Keep the connection of a client that waits for a stream in use."""
        exchange, parts = self._exchange, self._parts
        if not exchange.client.stream:
            return None
        headers = partial(reply_headers, exchange.record)
        return WaitingStream(exchange.stream, headers, parts.stream_head_s, parts.stream_comment_s)

    def _close(self) -> None:
        """Close open legs, and drop references to this object, which has the prompt."""
        exchange, record = self._exchange, self._exchange.record
        is_running = record.outcome is Outcome.RUNNING
        self._report(Stopped(Outcome.CANCELLED if is_running else record.outcome))
        if self.life.blocks.get(Blocks.PULL) is not None:
            is_over = record.outcome is Outcome.FINISHED
            num_pulled = self._num_of_use(record.cached_tokens if is_over else 0)
            record.pulled(num_pulled)
            outcome = self.life.blocks.pull_outcome
            self._parts.metrics.control.pulled(self._plan.routed.pull_link, outcome, num_pulled)
        if self._suspicion is not None:
            self._parts.suspects.left(self._suspicion)
        self._set_timer(None)
        self._warm_leg.end()
        self._report_received()
        self._moving.close()
        self._legs.close()
        exchange.on_finished = None
        self._next = self._legs.give_up

    def _report_received(self) -> None:
        """Report what came from a PrfaaS cluster, however its transfer ended."""
        plan, facts = self._plan, self._parts.facts
        if plan.layout is None or not facts.wants(BlocksReceived):
            return
        routed, prompt, destination = plan.routed, plan.prompt, plan.route.pools[1]
        crossing = {Blocks.HAND_OFF} if routed.decision.path is Path.REMOTE else set()
        crossing |= {Blocks.PULL} if routed.decision.pull_tokens else set()
        views = [
            view
            for blocks, view in self._moving.all
            if blocks in crossing and view.destination == destination and not view.stays
        ]
        facts.report(
            BlocksReceived(
                destination,
                views,
                self.life.decode or plan.route.decode,
                self._parts.prefill_leg.layout_of(plan) or plan.layout,
                prompt.token_ids,
                prompt.hashes,
                prompt.cache_salt,
                routed.present_tokens,
                plan.route.final_tokens if Blocks.HAND_OFF in crossing else routed.hit_tokens,
                plan.arrival.quality.is_lossy,
            )
        )

    def _num_of_use(self, cached_tokens: int | None) -> int:
        """Tokens of a pulled prefix that an engine used."""
        routed = self._plan.routed
        return max(0, min(cached_tokens or 0, routed.hit_tokens) - routed.own_tokens)

    # Events and actions: those that begin something are kept for `answer`, others done at once

    def _report(self, event: AnyEvent) -> None:
        """Execute the actions of an event; events that occur meanwhile follow."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        try:
            while self._events:
                event = self._events[0]
                found = self.life.step(event, time.monotonic_ns())
                self._exchange.record.stepped(event, self.life.stage.value, found)
                for action in found:
                    self.methods[type(action)](self, action)
                del self._events[0]
        finally:
            self._events.clear()
            if self._stepped is not None:
                self._stepped.set()
            self._turn.look()

    def _start_prefill(self, action: actions.StartPrefill) -> None:
        engine = self._engine(action)
        if self._plan.routed.decision.path is Path.REMOTE and not self._legs.is_over_with(engine):
            layout = self._parts.prefill_leg.layout_of(self._plan)
            self._moving.charge(self._plan, layout, self._plan.route.final_tokens)
        if not action.relay_tokens and self._plan.route.relay_max:
            self._exchange.record.relay.why_not = "the blocks are expected soon"
        self._next = partial(self._legs.prefill, engine, action.relay_tokens)

    def _await_blocks(self, action: actions.AwaitBlocks) -> None:
        self._moving.computed(action.blocks)
        self._next = self._await_leg

    async def _await_leg(self) -> None:
        """Wait until the machine names a leg."""
        self._stepped = stepped = asyncio.Event()
        while self._next == self._await_leg:
            stepped.clear()
            await stepped.wait()

    def _start_decode(self, action: actions.StartDecode) -> None:
        self._next = partial(self._legs.decode, self._engine(action))

    def _warm_decode(self, action: actions.WarmDecode) -> None:
        answer, hand_off = self._exchange.answer, self.life.blocks.open(Blocks.HAND_OFF)
        assert answer is not None  # noqa: S101 (a relay has made some of it)
        awaited = None if hand_off is None else self._moving.get(Blocks.HAND_OFF)
        self._warm_leg.begin(action.engine, answer, awaited, self._report)

    def _continue_on(self, action: actions.ContinueOn) -> None:
        self._warm_leg.end()
        self._next = partial(self._legs.continue_on, self._engine(action), action.after_ns)

    def _hold_back(self, action: actions.HoldBack) -> None:
        self._next = partial(self._await_turn, self._engine(action))

    def _fail(self, _: actions.Fail) -> None:
        self._next = self._legs.give_up

    def _start_pull(self, _: actions.StartPull) -> None:
        if self._plan.routed.decision.pull_tokens:
            self._moving.charge(self._plan, self._plan.layout, self._plan.routed.hit_tokens)
        if not self._moving.fetch(self._plan):
            self._report(PullNotAsked())

    def _stop_prefill(self, _: actions.StopPrefill) -> None:
        self._legs.stop_prefill()

    def _abort(self, action: actions.Abort) -> None:
        self._moving.abort(action.blocks, action.why)

    def _release(self, action: actions.Release) -> None:
        self._moving.release(action.blocks)

    def _fell_back(self, action: actions.FellBack) -> None:
        self._exchange.fall_back(action)
        pools = ("", "") if action.stage == "decode" else self._plan.route.pools
        found = trouble(self._exchange.record, action.stage, action.reason, pools)
        self._parts.facts.report(found)

    def _retry(self, action: actions.Retry) -> None:
        self._parts.metrics.retried("made" if action.is_allowed else "over_budget")

    def _wake_at(self, action: actions.WakeAt) -> None:
        self._set_timer(action.at_ns)

    def _engine(self, action: actions.OnEngine) -> Engine:
        return self._parts.engines.by_name[action.engine]

    def _set_timer(self, at_ns: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_ns is not None:
            after_s = max(0, at_ns - time.monotonic_ns()) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(after_s, self._wake, at_ns)

    def _wake(self, at_ns: int) -> None:
        # The loop's clock may be early by its resolution.
        if time.monotonic_ns() < at_ns:
            self._set_timer(at_ns)
        else:
            self._report(Woke())

    async def _await_turn(self, engine: Engine) -> None:
        """An engine failed before the first token: if it died, its prompt is suspect.

        Raises:
            PromptBreaksEnginesError: It was not the first one.
            UnavailableError: The turn of this prompt does not come.
        """
        if await self._parts.engines.is_gone(engine):
            death = engine.name, engine.num_lost
            # Its turn is over: the next one may be another request's, with the same prompt.
            self._suspicion = None
            killed = self._parts.suspects.killed(self._plan.prompt, death, engine.num_lost_legs)
            self._suspicion = await killed
        self._report(TurnCame())

    # The answer

    def _first_token(self) -> None:
        """An engine has begun to answer, which those before it could have done as well."""
        if self._exchange.record.ttft_ns is not None:
            self._report(FirstToken())
        if self._suspicion is not None:
            self._parts.suspects.cleared(self._suspicion)
            self._suspicion = None

    def _finished(self) -> None:
        """The answer is complete."""
        found, warm = self._exchange.usage.decode_cached or 0, self._warm_leg.found_tokens
        found = found if warm is None else min(found, warm)
        self._report(Finished(found, self._exchange.record.cached_tokens or 0))
