"""One request in the gateway: carries out what the core's machine decides, over HTTP and messages.

The machine (`core/request`) gets every event with the time. Actions that take no time are done at
once; a leg runs until its engine's answer is an event, or until the machine ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import assert_never

from aiohttp import web

from prfaas.core.request.actions import (
    Abort,
    AnyAction,
    ContinueOn,
    Fail,
    FellBack,
    HoldBack,
    Release,
    Retry,
    StartDecode,
    StartPrefill,
    StartPull,
    StopPrefill,
    WakeAt,
)
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
from prfaas.core.request.fleet import Fleet
from prfaas.core.request.machine import RequestLife
from prfaas.core.request.states import Stage
from prfaas.errors import EngineError
from prfaas.gateway.admission.quarantine import Suspects
from prfaas.gateway.engines.engine_client import (
    INTERNAL_ERROR,
    Engine,
    Engines,
    EngineUnreachableError,
    SuspectError,
)
from prfaas.gateway.http.json_codec import from_json
from prfaas.gateway.http.rejections import UnavailableError
from prfaas.gateway.serving.continuation import Answer, may_continue, stop_strings
from prfaas.gateway.serving.decode_leg import BROKEN, DecodeLeg, LegBrokenError, error_answer
from prfaas.gateway.serving.moving_blocks import Movers, MovingBlocks
from prfaas.gateway.serving.prefill_leg import PrefillGivenUpError, PrefillLeg
from prfaas.gateway.serving.rehearsal import Rehearsal
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import Plan
from prfaas.gateway.serving.stream_handover import Ending
from prfaas.gateway.telemetry.metrics import Metrics
from prfaas.gateway.telemetry.request_record import Fallback
from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Parts:
    """What carries out the actions of all requests.

    Attributes:
        fleet: What the machines of all requests share.
        engines: Tell whether an engine is gone.
        prefill_leg: Runs the prefill leg.
        decode_leg: Runs the decode leg.
        ending: Ends and continues streams that engines left.
        movers: Move blocks.
        rehearsal: Asks engines whether they take a request.
        suspects: Keep prompts that break engines from further ones.
        metrics: Count.
    """

    fleet: Fleet
    engines: Engines
    prefill_leg: PrefillLeg
    decode_leg: DecodeLeg
    ending: Ending
    movers: Movers
    rehearsal: Rehearsal
    suspects: Suspects
    metrics: Metrics


class RequestRun:
    """Carries out the actions for one request.

    Args:
        parts: By what.
        exchange: The request.
        plan: Where it goes.
    """

    def __init__(self, parts: Parts, exchange: Exchange, plan: Plan) -> None:
        self._parts, self._exchange, self._plan = parts, exchange, plan
        if plan.layout is not None:
            exchange.usage.cache_end = plan.layout.last_whole_block(plan.prompt.num_tokens)
        self.life = RequestLife(plan.route, parts.fleet)
        self._next: AnyAction | None = None
        """The leg, or what comes instead of one, that the machine asked for last."""
        self._events: deque[AnyEvent] = deque()
        """Events that are being reported; the first one's actions are being done."""
        self._prefilling: asyncio.Task[int] | None = None
        self._moving = MovingBlocks(parts.movers, exchange, self._report)
        self._timer: asyncio.TimerHandle | None = None
        self._broken: EngineError | None = None
        """Why the last decode leg ended."""
        self._suspicion: bytes | None = None
        """Digest of the prompt while it runs as one after which an engine died."""
        self._left = exchange.client, plan.prompt
        """What of the request is left to do, and all tokens so far."""

    async def answer(self) -> web.StreamResponse:
        """Lead the request to its answer.

        Raises:
            UnavailableError: No engine could take it.
            EngineError: An engine broke after its answer had begun.
        """
        exchange, plan = self._exchange, self._plan
        exchange.on_first_token = self._first_token
        exchange.on_finished = self._finished
        try:
            self._suspicion = await self._parts.suspects.enter(plan.prompt)
            self._report(Begun())
            while True:
                found = await self._leg()
                if found is not None:
                    return found
        except EngineError:
            exchange.record.ended(Outcome.FAILED)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        """Close what is open, and let go of what refers to this: it has the prompt."""
        exchange, record = self._exchange, self._exchange.record
        is_running = record.outcome is Outcome.RUNNING
        self._report(Stopped(Outcome.CANCELLED if is_running else record.outcome))
        if self.life.blocks.get(Blocks.PULL) is not None:
            is_over = record.outcome is Outcome.FINISHED
            num_pulled = self._num_of_use(record.cached_tokens if is_over else 0)
            record.pulled(num_pulled)
            link = self._plan.routed.source, self._plan.routed.destination
            outcome = self.life.blocks.pull_outcome
            self._parts.metrics.pulls.ended(link, outcome, num_pulled)
        if self._suspicion is not None:
            self._parts.suspects.left(self._suspicion)
        self._moving.close()
        exchange.on_first_token, exchange.on_finished, self._broken = None, None, None

    def _num_of_use(self, cached_tokens: int | None) -> int:
        """Tokens of a pulled prefix that an engine used."""
        routed = self._plan.routed
        return max(0, min(cached_tokens or 0, routed.hit_tokens) - routed.facts.pd_hit_tokens)

    # Events and actions

    def _report(self, event: AnyEvent) -> None:
        """Do what an event leads to; what comes up meanwhile is reported after it."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        try:
            while self._events:
                for action in self.life.step(self._events[0], time.monotonic_ns()):
                    self._do(action)
                self._events.popleft()
        finally:
            self._events.clear()

    def _do(self, action: AnyAction) -> None:
        """Do what takes no time; keep what does for `_leg`."""
        match action:
            case StartPrefill() | StartDecode() | ContinueOn() | HoldBack() | Fail():
                self._next = action
            case StartPull():
                if not self._moving.fetch(self._plan):
                    self._report(PullNotAsked())
            case StopPrefill():
                if self._prefilling is not None:
                    self._prefilling.cancel()
            case Abort(blocks, why):
                self._moving.abort(blocks, why)
            case Release(blocks):
                self._moving.release(blocks)
            case FellBack(stage, reason, why):
                self._exchange.fall_back(Fallback(stage, reason), why)
            case Retry(is_allowed):
                self._parts.metrics.retried("made" if is_allowed else "over_budget")
            case WakeAt(at_ns):
                self._set_timer(at_ns)
            case _:
                assert_never(action)

    async def _leg(self) -> web.StreamResponse | None:
        """Run what the machine asked for last; the answer, if it gave one."""
        by_name = self._parts.engines.by_name
        match self._next:
            case StartPrefill(name):
                await self._prefill(by_name[name])
            case StartDecode(name):
                return await self._begin_decode(by_name[name])
            case ContinueOn(name, after_ns):
                return await self._continue(by_name[name], after_ns)
            case HoldBack(name):
                await self._hold_back(by_name[name])
            case _:
                return await _give_up(self._exchange, self._broken)
        return None

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

    # Legs

    async def _prefill(self, engine: Engine) -> None:
        """Run the prefill leg, unless decode would refuse the request."""
        exchange, plan = self._exchange, self._plan
        # Until the leg has answered: what decode's pool or a pull brings.
        routed = plan.routed
        exchange.usage.cached_max = routed.hit_tokens if routed.pulls else routed.present_tokens
        if await self._parts.rehearsal.is_refused(exchange, plan):
            why = "the decode engine refuses its fields"
            self._report(PrefillFailed(PrefillFailure.REFUSED, why=why))
            return
        if self.life.stage is not Stage.PREFILLING:
            return
        transfer = self._moving.open(Blocks.HAND_OFF, *plan.route.pools)
        exchange.record.prefill_on(engine.name)
        headers = exchange.leg_headers("p")
        run = self._parts.prefill_leg.run(
            plan, engine, transfer, headers, self._moving.get(self.life.awaited)
        )
        started_ns = time.monotonic_ns()
        leg = self._prefilling = asyncio.create_task(run)
        try:
            await asyncio.wait({leg})
        finally:
            self._prefilling = None
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
        exchange.record.prefilled(time.monotonic_ns() - started_ns)
        if leg.cancelled():
            return
        self._report(self._prefilled(leg))

    def _prefilled(self, leg: asyncio.Task[int]) -> AnyEvent:
        # Raised here, an error would refer to the request by this frame.
        error = leg.exception()
        if isinstance(error, PrefillGivenUpError):
            is_suspect = isinstance(error, SuspectError)
            return PrefillFailed(error.kind, error.may_have_died, is_suspect, str(error))
        self._exchange.usage.cached_max = leg.result()
        return PrefillDone()

    async def _begin_decode(self, engine: Engine) -> web.StreamResponse | None:
        exchange = self._exchange
        exchange.record.decode_asked()
        if self._parts.decode_leg.has_others and may_continue(exchange.client):
            exchange.answer = Answer(stop_strings(exchange.client))
        return await self._decode(engine)

    async def _continue(self, engine: Engine, after_ns: int) -> web.StreamResponse | None:
        """Run the rest of the request on another engine."""
        exchange = self._exchange
        await asyncio.sleep(after_ns / NS_PER_S)
        exchange.record.decode_on(engine.name)
        if exchange.stream.has_begun:
            self._left = await self._parts.ending.seam(exchange, self._plan)
            if exchange.is_answered:
                return await self._parts.ending.end(exchange, self._plan)
        exchange.on_first_token = self._first_token
        return await self._decode(engine)

    async def _decode(self, engine: Engine) -> web.StreamResponse | None:
        exchange = self._exchange
        try:
            answer = await self._parts.decode_leg.run(
                engine, exchange, *self._left, self._moving.get(self.life.awaited)
            )
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

    async def _hold_back(self, engine: Engine) -> None:
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
        found = self._exchange.usage.decode_cached or 0
        self._report(Finished(found, self._exchange.record.cached_tokens or 0))


def _may_have_died(error: EngineError) -> bool:
    """Whether an engine had a request, and may have ended over it."""
    if isinstance(error, EngineUnreachableError):
        return error.had_request
    return isinstance(error, LegBrokenError) and error.status in (INTERNAL_ERROR, BROKEN)


async def _give_up(exchange: Exchange, error: EngineError | None) -> web.StreamResponse:
    """Nobody else can go on: say what the engine said, or that it is gone.

    Raises:
        UnavailableError: Nothing has reached the client.
        EngineError: Something has.
    """
    exchange.record.ended(Outcome.FAILED)
    if exchange.stream.has_begun and error is not None:
        if isinstance(error, LegBrokenError) and error.reason == "error":
            return await exchange.stream.fail(from_json(error.body))
        raise error
    if isinstance(error, LegBrokenError) and error.reason in ("status_5xx", "error"):
        return error_answer(error, exchange)
    raise UnavailableError(f"{error}; no other engine can take the request")
