"""The legs of one request: run on an engine, their ends reported as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from prfaas.core.facts import FactStream
from prfaas.core.request.events import (
    AnyEvent,
    Blocks,
    DecodeFailure,
    EngineBroke,
    Outcome,
    PrefillDone,
    PrefillFailed,
    PrefillFailure,
)
from prfaas.core.request.fleet import SharedState
from prfaas.core.request.machine import RequestLife
from prfaas.core.request.states import Stage
from prfaas.errors import EngineError
from prfaas.gateway.admission.engine_slots import Holding
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
from prfaas.gateway.serving.decode_leg import (
    BROKEN,
    DecodeLeg,
    LegBrokenError,
    StreamHandover,
    refuse,
)
from prfaas.gateway.serving.leg_requests import Rehearsal
from prfaas.gateway.serving.prefill_leg import Movers, MovingBlocks, PrefillGivenUpError, PrefillLeg
from prfaas.gateway.serving.request_state import (
    Exchange,
    StreamedAnswer,
    may_continue,
    stop_strings,
)
from prfaas.gateway.serving.routing_step import Planner, RoutedPrompt
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.logs import log_event
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_S

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestServices:
    """Services that execute the actions of all requests.

    Attributes:
        holding: Holds back what engines would only queue.
        fleet: What the machines of all requests share.
        ending: Ends and continues streams that engines left.
        suspects: Keep prompts that break engines from further ones.
        stream_head_s: A stream without a token by then gets its head, seconds.
        stream_comment_s: Time between two comments of such a stream, seconds.
    """

    holding: Holding
    planner: Planner
    fleet: SharedState
    engines: Engines
    prefill_leg: PrefillLeg
    decode_leg: DecodeLeg
    ending: StreamHandover
    movers: Movers
    rehearsal: Rehearsal
    suspects: PromptQuarantine
    facts: FactStream
    metrics: GatewayMetrics
    stream_head_s: float
    stream_comment_s: float


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
        self._prefilling: asyncio.Task[int] | None = None
        self._broken: EngineError | None = None
        """Reason for the end of the last decode leg."""
        self._left = exchange.client, plan.prompt
        """Rest of the request, and all tokens so far."""

    def begin(self, report: Callable[[AnyEvent], None], first_token: Callable[[], None]) -> None:
        """Report events from here on, and the first output of each decode leg."""
        self._report, self._first_token = report, first_token
        self._exchange.on_first_token = first_token

    def close(self) -> None:
        """The request is over: refer to nobody who reports."""
        self._report, self._first_token, self._broken = lambda _: None, None, None
        self._exchange.on_first_token = None

    def stop_prefill(self) -> None:
        """End the prefill leg."""
        if self._prefilling is not None:
            self._prefilling.cancel()

    async def prefill(self, engine: Engine) -> None:
        """Run the prefill leg, unless decode would refuse the request."""
        exchange, plan = self._exchange, self._plan
        # Until the leg has answered: what decode's pool or a pull to it brings.
        routed = plan.routed
        is_there = routed.pulls and not routed.ships
        exchange.usage.cached_max = routed.hit_tokens if is_there else routed.present_tokens
        if await self._parts.rehearsal.is_refused(exchange, plan):
            why = "the decode engine refuses its fields"
            self._report(PrefillFailed(PrefillFailure.REFUSED, why=why))
            return
        if self._life.stage is not Stage.PREFILLING:
            return
        transfer = self._moving.open(Blocks.HAND_OFF, *plan.route.pools)
        self._moving.expect(plan)
        if plan.route.holds and (why_not := self._moving.follow(plan, transfer)):
            why = f"{transfer.destination} is not asked to fetch the blocks: {why_not}"
            self._report(PrefillFailed(PrefillFailure(why_not), why=why))
            return
        exchange.record.prefill_on(engine.name)
        headers = exchange.leg_headers("p")
        run = self._parts.prefill_leg.run(
            plan, engine, transfer, headers, self._moving.get(self._life.awaited)
        )
        started_ns = time.monotonic_ns()
        leg = self._prefilling = asyncio.create_task(run)
        try:
            await asyncio.wait({leg})
        finally:
            self._prefilling = None
            await cancel_all([leg])
        exchange.record.prefilled(time.monotonic_ns() - started_ns)
        if not leg.cancelled():
            self._report(self._prefilled(leg))
        elif self._life.stage in (Stage.DECODING,) and not exchange.record.fallback:
            log_event(_log, logging.WARNING, "prefill_unanswered", engine=engine.name)

    def _prefilled(self, leg: asyncio.Task[int]) -> AnyEvent:
        # Raised here, an error would refer to the request by this frame.
        error = leg.exception()
        if isinstance(error, PrefillGivenUpError):
            is_suspect = isinstance(error, SuspectError)
            return PrefillFailed(error.kind, error.may_have_died, is_suspect, str(error))
        self._exchange.usage.cached_max = leg.result()
        return PrefillDone()

    async def decode(self, engine: Engine) -> web.StreamResponse | None:
        """Run the first decode leg; the answer, if it gave one."""
        exchange = self._exchange
        exchange.record.decode_on(engine.name)
        exchange.record.decode_asked()
        if self._parts.decode_leg.has_others and may_continue(exchange.client):
            exchange.answer = StreamedAnswer(stop_strings(exchange.client))
        return await self._run_decode(engine)

    async def continue_on(self, engine: Engine, after_ns: int) -> web.StreamResponse | None:
        """Run the rest of the request on another engine."""
        exchange = self._exchange
        await asyncio.sleep(after_ns / NS_PER_S)
        exchange.record.decode_on(engine.name)
        if exchange.stream.has_begun:
            self._left = await self._parts.ending.seam(exchange, self._plan)
            if exchange.is_answered:
                return await self._parts.ending.end(exchange, self._plan)
        exchange.on_first_token = self._first_token
        return await self._run_decode(engine)

    async def _run_decode(self, engine: Engine) -> web.StreamResponse | None:
        exchange = self._exchange
        try:
            answer = await self._parts.decode_leg.run(
                engine, exchange, *self._left, self._moving.get(self._life.awaited)
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


def _may_have_died(error: EngineError) -> bool:
    """Return True if an engine had a request, and may have died of it."""
    if isinstance(error, EngineUnreachableError):
        return error.had_request
    return isinstance(error, LegBrokenError) and error.status in (INTERNAL_ERROR, BROKEN)
