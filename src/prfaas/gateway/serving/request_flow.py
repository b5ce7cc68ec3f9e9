"""Serves requests: takes a slot, decides, and has the request led to its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from aiohttp import web

from prfaas.gateway.admission.engine_slots import Holding
from prfaas.gateway.serving.request_legs import Parts
from prfaas.gateway.serving.request_run import RequestRun
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import Planner


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves requests.

    Attributes:
        holding: Holds back what engines would only queue.
        planner: Decides.
        parts: Carry out what requests need.
    """

    holding: Holding
    planner: Planner
    parts: Parts

    async def serve(self, exchange: Exchange) -> web.StreamResponse:
        """Answer one request.

        Raises:
            RequestError: The client's fault.
            UnavailableError: No engine could take it.
            EngineError: An engine broke after its answer had begun.
        """
        async with self.holding.slots(exchange.tenant.name, exchange.client.num_sequences):
            self.parts.fleet.retries.deposit(time.monotonic_ns())
            try:
                plan = await self.planner.plan(exchange.client, exchange.tenant, exchange.record)
            finally:
                self.parts.metrics.decided(exchange.record)
            return await RequestRun(self.parts, exchange, plan).answer()
