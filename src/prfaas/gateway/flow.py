"""The life of one request: plan, prefill leg, decode leg, and what to do when a leg fails."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from aiohttp import web

from prfaas.gateway.deciding import Plan, Planner, UnavailableError
from prfaas.gateway.decode import DecodeLeg
from prfaas.gateway.driver import Driver
from prfaas.gateway.engines import Engine, EngineUnreachableError
from prfaas.gateway.exchange import Exchange
from prfaas.gateway.guards import Guards, Told
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.pools import Pools
from prfaas.gateway.prefill import PrefillGivenUpError, PrefillLeg
from prfaas.gateway.records import Fallback, Outcome
from prfaas.gateway.transfers import Transfers
from prfaas.wire.frames import TRANSFER_ID_BYTES


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves requests.

    Attributes:
        planner: Decides.
        driver: Hears how it went.
        guards: Hear of transfers, and let legs be run again.
        prefill_leg: Runs the prefill leg.
        decode_leg: Runs the decode leg.
        pools: Hear of given-up transfers.
        transfers: Follow transfers.
        metrics: Count.
    """

    planner: Planner
    driver: Driver
    guards: Guards
    prefill_leg: PrefillLeg
    decode_leg: DecodeLeg
    pools: Pools
    transfers: Transfers
    metrics: Metrics

    async def serve(self, exchange: Exchange) -> web.StreamResponse:
        """Answer one request.

        Raises:
            RequestError: The client's fault.
            UnavailableError: No engine could take it.
            EngineError: An engine broke after its answer had begun.
        """
        self.guards.came()
        try:
            plan = await self.planner.plan(exchange.client, exchange.tenant, exchange.record)
        finally:
            self.metrics.decided(exchange.record)
        exchange.final_tokens = plan.final_tokens
        number = plan.ask.number
        exchange.on_first_token = lambda: self.driver.prefilled(number, time.monotonic_ns())
        try:
            if plan.prefill is not None:
                await self._prefill(exchange, plan, plan.prefill)
            return await self._decode(exchange, plan)
        finally:
            if exchange.record.outcome is not Outcome.FINISHED:
                self._give_up_transfer(exchange, "the request ended early")
            self.driver.end(number, time.monotonic_ns())

    async def _prefill(self, exchange: Exchange, plan: Plan, engine: Engine) -> None:
        """Run the prefill leg; on any failure the request goes on without it."""
        record = exchange.record
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        transfer = self.transfers.open(transfer_id, engine.pool, plan.decode.pool, plan.ask.number)
        exchange.transfer = record.transfer = transfer
        self.guards.began((transfer.source, transfer.destination))
        record.prefill_engine = engine.name
        try:
            exchange.usage.cached_max = await self.prefill_leg.run(
                plan, engine, transfer, record, exchange.leg_headers("p")
            )
            self.driver.prefilled(plan.ask.number, time.monotonic_ns())
        except PrefillGivenUpError as error:
            exchange.usage.cached_max = plan.pd_hit_tokens
            self._give_up_transfer(exchange, "the prefill leg was given up")
            self.driver.fall_back(plan.ask.number, time.monotonic_ns())
            exchange.fall_back(error.fallback, str(error))

    async def _decode(self, exchange: Exchange, plan: Plan) -> web.StreamResponse:
        """Run the decode leg, on another engine if the first one can not be reached."""
        try:
            return await self.decode_leg.run(plan.decode, exchange, plan.prompt)
        except EngineUnreachableError as error:
            other = self.planner.elsewhere(plan)
            if other is None:
                raise UnavailableError(f"{error}; no other engine is ready") from None
            self._give_up_transfer(exchange, "the decode engine is gone")
            exchange.fall_back(Fallback("decode", "unreachable"), str(error))
            exchange.record.decode_engine = other.name
        try:
            return await self.decode_leg.run(other, exchange, plan.prompt)
        except EngineUnreachableError as error:
            raise UnavailableError(str(error)) from None

    def _give_up_transfer(self, exchange: Exchange, reason: str) -> None:
        if exchange.transfer is not None:
            transfer, exchange.transfer = exchange.transfer, None
            self.pools.abort(transfer, reason)
            self.guards.ended((transfer.source, transfer.destination), Told.NOTHING)
