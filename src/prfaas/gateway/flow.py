"""The life of one request: plan, prefill leg, decode leg, and what to do when a leg fails."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from prfaas.core.breakers import Told
from prfaas.errors import EngineError
from prfaas.gateway.deciding import Plan, Planner
from prfaas.gateway.decode import BROKEN, DecodeLeg, LegBrokenError, error_answer
from prfaas.gateway.driver import Driver
from prfaas.gateway.ending import Ending
from prfaas.gateway.engines import INTERNAL_ERROR, Engine, Engines, EngineUnreachableError
from prfaas.gateway.exchange import Exchange
from prfaas.gateway.guards import Guards
from prfaas.gateway.hedges import Hedges
from prfaas.gateway.jsons import from_json
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.pools import Pools
from prfaas.gateway.prefill import PrefillGivenUpError, PrefillLeg
from prfaas.gateway.pulling import Pulling
from prfaas.gateway.records import Fallback, Outcome
from prfaas.gateway.rejections import UnavailableError
from prfaas.gateway.seam import Answer, may_continue, stop_strings
from prfaas.gateway.serving.rehearsal import Rehearsal
from prfaas.gateway.serving.suspects import Suspects
from prfaas.gateway.tenancy.holding import Holding
from prfaas.gateway.transfers import LATE, Transfers
from prfaas.units import NS_PER_S
from prfaas.wire.frames import TRANSFER_ID_BYTES

LEGS_MAX = 3
"""Decode legs of one request: a prompt that breaks engines does not get to break all of them."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves requests.

    Attributes:
        engines: Tell whether an engine is gone.
        planner: Decides.
        driver: Hears how it went.
        guards: Hear of transfers, and let legs be run again.
        prefill_leg: Runs the prefill leg.
        decode_leg: Runs the decode leg.
        hedges: Tell when a remote path is to be left.
        pulling: Has prefixes fetched for prefills at home.
        ending: Ends and continues streams that engines left.
        pools: Hear of given-up transfers.
        transfers: Follow transfers.
        rehearsal: Asks engines whether they take a request.
        suspects: Keep prompts that break engines from further ones.
        metrics: Count.
        holding: Holds back what engines would only queue.
    """

    engines: Engines
    planner: Planner
    driver: Driver
    guards: Guards
    prefill_leg: PrefillLeg
    decode_leg: DecodeLeg
    hedges: Hedges
    pulling: Pulling
    ending: Ending
    pools: Pools
    transfers: Transfers
    rehearsal: Rehearsal
    suspects: Suspects
    metrics: Metrics
    holding: Holding

    async def serve(self, exchange: Exchange) -> web.StreamResponse:
        """Answer one request.

        Raises:
            RequestError: The client's fault.
            UnavailableError: No engine could take it.
            EngineError: An engine broke after its answer had begun.
        """
        async with self.holding.slots(exchange.tenant.name, exchange.client.num_sequences):
            return await self._serve(exchange)

    async def _serve(self, exchange: Exchange) -> web.StreamResponse:
        self.guards.came()
        try:
            plan = await self.planner.plan(exchange.client, exchange.tenant, exchange.record)
        finally:
            self.metrics.decided(exchange.record)
        exchange.final_tokens = plan.final_tokens
        if plan.layout is not None:
            exchange.usage.cache_end = plan.layout.last_whole_block(plan.prompt.num_tokens)
        number = plan.ask.number
        exchange.on_first_token = partial(self._first_token, exchange, number)
        try:
            exchange.suspicion = await self.suspects.enter(plan.prompt)
            self.pulling.begin(exchange, plan)
            if plan.prefill is not None and not await self._is_refused(exchange, plan):
                await self._prefill(exchange, plan, plan.prefill)
            return await self._decode(exchange, plan)
        except EngineError:
            exchange.record.outcome = Outcome.FAILED
            raise
        finally:
            exchange.stop_watching()
            if exchange.record.outcome is not Outcome.FINISHED:
                self._give_up_transfer(exchange, "the request ended early")
            elif exchange.is_short:
                self._give_up_transfer(exchange, "decode went on without its blocks")
            elif exchange.transfer is not None and not exchange.transfer.stays:
                self.pools.release(exchange.transfer)
            self.pulling.end(exchange)
            if exchange.suspicion is not None:
                self.suspects.left(exchange.suspicion)
            self._judge(exchange)
            self.driver.end(number, time.monotonic_ns())

    async def _is_refused(self, exchange: Exchange, plan: Plan) -> bool:
        """Return True if decode would refuse a request: then it gets it without a prefill leg."""
        if not await self.rehearsal.is_refused(exchange, plan):
            return False
        exchange.usage.cached_max = plan.pd_hit_tokens
        self.driver.fall_back(plan.ask.number, time.monotonic_ns())
        exchange.fall_back(Fallback("prefill", "refused"), "the decode engine refuses its fields")
        return True

    async def _prefill(self, exchange: Exchange, plan: Plan, engine: Engine) -> None:
        """Run the prefill leg; on any failure the request goes on without it."""
        record = exchange.record
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        transfer = self.transfers.open(transfer_id, engine.pool, plan.decode.pool, plan.ask.number)
        exchange.transfer = transfer
        if not transfer.stays:
            record.transfer, transfer.trace = transfer, exchange.trace.of_transfer(record)
            self.guards.began((transfer.source, transfer.destination))
            exchange.watch = self.hedges.watch(plan, transfer, record.deadline_ns)
        record.prefill_engine = engine.name
        stalls = asyncio.create_task(self.hedges.watch_prefill(plan, transfer))
        try:
            exchange.usage.cached_max = await self.prefill_leg.run(
                plan,
                engine,
                transfer,
                record,
                exchange.leg_headers("p"),
                exchange.awaited_pull,
            )
            now_ns = time.monotonic_ns()
            self.driver.prefill_answered(plan.ask.number, now_ns)
            self.driver.prefilled(plan.ask.number, now_ns)
            if transfer.stays:
                self.driver.handed_over(plan.ask.number, now_ns)
        except PrefillGivenUpError as error:
            exchange.suspect(engine.name, error)
            routed = plan.routed
            exchange.usage.cached_max = routed.hit_tokens if routed.pulls else plan.pd_hit_tokens
            self._give_up_transfer(exchange, "the prefill leg was given up")
            self.driver.fall_back(plan.ask.number, time.monotonic_ns())
            exchange.fall_back(error.fallback, str(error))
            if error.may_have_died:
                await self._hold_back(exchange, plan, engine)
        finally:
            stalls.cancel()

    async def _decode(self, exchange: Exchange, plan: Plan) -> web.StreamResponse:
        """Run the decode leg; when its engine breaks, run the rest on another."""
        transfer = exchange.transfer
        if exchange.watch is None or transfer is None:
            return await self._decode_legs(exchange, plan)
        leave = partial(self._leave, exchange, plan)
        transfer.broken.add_done_callback(leave)
        try:
            return await self._decode_legs(exchange, plan)
        finally:
            # Views of transfers are remembered by the thousand, prompts must not be.
            transfer.broken.remove_done_callback(leave)

    async def _decode_legs(self, exchange: Exchange, plan: Plan) -> web.StreamResponse:
        engine, client, prompt = plan.decode, exchange.client, plan.prompt
        exchange.record.decode_at_ns = time.monotonic_ns()
        if self.decode_leg.has_others and may_continue(client):
            exchange.answer = Answer(stop_strings(client))
        for legs_left in reversed(range(LEGS_MAX)):
            try:
                answer = await self.decode_leg.run(engine, exchange, client, prompt)
                if answer is not None:
                    return answer
            except (EngineUnreachableError, LegBrokenError) as error:
                broken = error
                exchange.suspect(engine.name, error)
            if exchange.is_answered:
                return await self.ending.end(exchange, plan)
            other = await self._other(exchange, plan, engine, broken) if legs_left else None
            if other is None:
                break
            if exchange.stream.has_begun:
                client, prompt = await self.ending.seam(exchange, plan)
                if exchange.is_answered:
                    return await self.ending.end(exchange, plan)
            engine = other
        return await _give_up(exchange, broken)

    async def _other(
        self, exchange: Exchange, plan: Plan, tried: Engine, error: EngineError
    ) -> Engine | None:
        """Who takes over from an engine that broke, once it is its turn; None without any."""
        if exchange.stream.has_begun and exchange.answer is None:
            return None
        self._give_up_transfer(exchange, "the decode engine is gone")
        self.pulling.give_up(exchange, "the decode engine is gone")
        if exchange.record.ttft_ns is None and _may_have_died(error):
            await self._hold_back(exchange, plan, tried)
        other = self.planner.elsewhere(plan, avoid=tried.name)
        if other is None:
            return None
        wait_ns = self.guards.retries.take(time.monotonic_ns())
        self.metrics.retried("over_budget" if wait_ns is None else "made")
        if wait_ns is None:
            # Those that are run again tell of the engines.
            exchange.suspects.clear()
            return None
        await asyncio.sleep(wait_ns / NS_PER_S)
        reason = error.reason if isinstance(error, LegBrokenError) else "unreachable"
        exchange.fall_back(Fallback("decode", reason), str(error))
        exchange.record.decode_engine = other.name
        number = plan.ask.number
        # Who failed in mid-answer is judged by the rest of it.
        blames = exchange.record.ttft_ns is None
        exchange.on_first_token = partial(self._first_token, exchange, number, blames=blames)
        return other

    async def _hold_back(self, exchange: Exchange, plan: Plan, engine: Engine) -> None:
        """An engine failed before the first token: if it died, its prompt is suspect.

        Raises:
            PromptBreaksEnginesError: It was not the first one.
            UnavailableError: The turn of this prompt does not come.
        """
        if await self.engines.is_gone(engine):
            death = engine.name, engine.num_lost
            # Its turn is over: the next one may be another request's, with the same prompt.
            exchange.suspicion = None
            killed = self.suspects.killed(plan.prompt, death, engine.num_lost_legs)
            exchange.suspicion = await killed

    def _first_token(self, exchange: Exchange, number: int, *, blames: bool = True) -> None:
        """An engine has begun to answer, which those before it could have done as well."""
        now_ns = time.monotonic_ns()
        self.driver.prefilled(number, now_ns)
        self.driver.loaded(number)
        if exchange.record.ttft_ns is not None and exchange.record.fallback is None:
            self.driver.first_token(number, now_ns)
        if exchange.suspicion is not None:
            self.suspects.cleared(exchange.suspicion)
            exchange.suspicion = None
        if blames:
            self._blame(exchange)

    def _judge(self, exchange: Exchange) -> None:
        """What fails at several engines and is served by none is the request's fault."""
        outcome, has_one = exchange.record.outcome, len(set(exchange.suspects)) == 1
        if outcome is Outcome.FINISHED or (outcome is Outcome.FAILED and has_one):
            self._blame(exchange)

    def _blame(self, exchange: Exchange) -> None:
        """It was the engines' fault: another one served the request, or there is none to ask."""
        suspects, exchange.suspects = exchange.suspects, []
        for name in suspects:
            self.guards.ended(name, Told.FAILED)

    def _leave(self, exchange: Exchange, plan: Plan, broken: asyncio.Future[str]) -> None:
        """The blocks are late: decode does not wait for them any longer."""
        if exchange.watch is None or exchange.transfer is None or broken.cancelled():
            return
        if broken.result() == LATE:
            exchange.stop_watching()
            self._give_up_transfer(exchange, "the blocks are late")
            self.driver.fall_back(plan.ask.number, time.monotonic_ns())
            exchange.fall_back(Fallback("transfer", LATE), "the local path is sooner by now")

    def _give_up_transfer(self, exchange: Exchange, reason: str) -> None:
        if exchange.transfer is not None:
            transfer, exchange.transfer = exchange.transfer, None
            if transfer.stays:
                return
            self.pools.abort(transfer, reason)
            self.guards.ended((transfer.source, transfer.destination), Told.NOTHING)


def _may_have_died(error: EngineError) -> bool:
    """Whether an engine had a request, and may have ended over it."""
    if isinstance(error, EngineUnreachableError):
        return error.had_request
    return isinstance(error, LegBrokenError) and error.status in (INTERNAL_ERROR, BROKEN)


async def _give_up(exchange: Exchange, error: EngineError) -> web.StreamResponse:
    """Nobody else can go on: say what the engine said, or that it is gone.

    Raises:
        UnavailableError: Nothing has reached the client.
        EngineError: Something has.
    """
    exchange.record.outcome = Outcome.FAILED
    if exchange.stream.has_begun:
        if isinstance(error, LegBrokenError) and error.reason == "error":
            return await exchange.stream.fail(from_json(error.body))
        raise error
    if isinstance(error, LegBrokenError) and error.reason in ("status_5xx", "error"):
        return error_answer(error, exchange)
    raise UnavailableError(f"{error}; no other engine can take the request")
