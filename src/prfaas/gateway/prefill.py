"""The prefill leg: run in the PrfaaS cluster, watched, and given up without loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from prfaas.config.routing import RoutingTable
from prfaas.core.breakers import Told
from prfaas.core.manifest import MANIFEST_BYTES_MAX, manifest_of
from prfaas.core.transfers import TransferEnd
from prfaas.errors import EngineError
from prfaas.gateway.bodies import COMPLETIONS_PATH, prefill_body, wait_order
from prfaas.gateway.deciding import Plan
from prfaas.gateway.engine_answers import AnswerTooLongError, read_answer
from prfaas.gateway.engines import (
    INTERNAL_ERROR,
    Engine,
    Engines,
    EngineUnreachableError,
    SuspectError,
)
from prfaas.gateway.jsons import JsonObject, as_count, as_object, from_json
from prfaas.gateway.records import NS_PER_MS, Fallback, Record
from prfaas.gateway.tickets import TicketOffice
from prfaas.gateway.transfers import LATE, STALLED, TransferView
from prfaas.units import NS_PER_S

_log = logging.getLogger(__name__)
_OF_ENGINE = (TransferEnd.ENGINE_LOST, LATE, STALLED)
"""Ends of a transfer that the engine that prefills is the cause of."""


class PrefillGivenUpError(EngineError):
    """The remote prefill did not happen.

    Attributes:
        fallback: Why.
        may_have_died: True if the engine had the prompt, and may have ended over it.
    """

    def __init__(
        self, stage: str, reason: str, message: str, *, may_have_died: bool = False
    ) -> None:
        super().__init__(message)
        self.fallback = Fallback(stage, reason)
        self.may_have_died = may_have_died


class PrefillFailedError(PrefillGivenUpError, SuspectError):
    """The engine said that it failed at this request."""


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """Runs prefill legs.

    Attributes:
        engines: Posts the leg.
        model: Name of the model.
        limits: Timeouts.
        tickets: Signs what may move.
    """

    engines: Engines
    model: str
    limits: RoutingTable
    tickets: TicketOffice

    async def run(
        self,
        plan: Plan,
        engine: Engine,
        transfer: TransferView,
        record: Record,
        headers: Mapping[str, str],
        awaited: TransferView | None = None,
    ) -> int:
        """Compute the prompt's KV cache on `engine` and have it pushed.

        Args:
            plan: Of the request.
            engine: Where.
            transfer: To the pool of the engine that decodes.
            record: Takes the time.
            headers: Of the leg.
            awaited: A prefix on its way to `engine`.

        Returns:
            Prompt tokens that were cached over there.

        Raises:
            PrefillGivenUpError: Any failure; nothing is running any more then.
        """
        body = prefill_body(self.model, plan.prompt, self._order(plan, transfer, awaited))
        started_ns = time.monotonic_ns()
        leg = asyncio.create_task(self._post(engine, body, headers))
        try:
            either: set[asyncio.Future[Any]] = {leg, transfer.broken}
            await asyncio.wait(
                either,
                timeout=self.limits.prefill_timeout / NS_PER_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        except asyncio.CancelledError:
            await _stop(leg)
            raise
        record.prefill_ns = time.monotonic_ns() - started_ns
        if leg.done():
            return leg.result()
        await _stop(leg)
        if transfer.broken.done():
            reason = transfer.broken.result()
            stage = "prefill" if reason in _OF_ENGINE else "transfer"
            if reason == STALLED:
                self.engines.guards.ended(engine.name, Told.FAILED)
            raise PrefillGivenUpError(
                stage,
                reason,
                f"the transfer broke: {reason}",
                may_have_died=reason == TransferEnd.ENGINE_LOST,
            )
        self.engines.guards.ended(engine.name, Told.FAILED)
        limit_s = self.limits.prefill_timeout / NS_PER_S
        raise PrefillGivenUpError("prefill", "timeout", f"no answer within {limit_s:g} s")

    def _order(
        self, plan: Plan, transfer: TransferView, awaited: TransferView | None
    ) -> JsonObject:
        """What the engine's tier and the pools have to know."""
        if plan.layout is None:
            raise PrefillGivenUpError("prefill", "no_layout", "nobody has announced a layout")
        span = {"have_tokens": plan.pd_hit_tokens, "final_tokens": plan.final_tokens}
        order = {"transfer": transfer.transfer_id.hex(), "push_to": transfer.destination, **span}
        if transfer.stays:
            wait_ms = self.limits.transfer_timeout // NS_PER_MS
            return {**order, "wait": wait_order(awaited, wait_ms)}
        blocks = manifest_of(plan.layout, plan.ask.hashes, **span)
        if sum(map(len, blocks.values())) > MANIFEST_BYTES_MAX:
            raise PrefillGivenUpError(
                "prefill", "too_many_blocks", "the prompt has more blocks than a ticket can name"
            )
        ticket = self.tickets.issue(transfer, plan.layout, plan.ask.tenant, blocks, **span)
        return {**order, "ticket": ticket}

    async def _post(self, engine: Engine, body: JsonObject, headers: Mapping[str, str]) -> int:
        try:
            async with self.engines.post(engine, COMPLETIONS_PATH, body, headers) as response:
                status, answer = response.status, await read_answer(response)
        except EngineUnreachableError as error:
            raise PrefillGivenUpError(
                "prefill", "unreachable", str(error), may_have_died=error.had_request
            ) from None
        except AnswerTooLongError as error:
            raise PrefillGivenUpError("prefill", "bad_answer", str(error)) from None
        except aiohttp.ClientError as error:
            raise PrefillGivenUpError(
                "prefill", "broken", f"{type(error).__name__}", may_have_died=True
            ) from None
        if status != 200:
            label = f"status_{status // 100}xx"
            kind = PrefillFailedError if status == INTERNAL_ERROR else PrefillGivenUpError
            answers = f"{engine.name} answers {status}"
            raise kind("prefill", label, answers, may_have_died=status == INTERNAL_ERROR)
        return _cached_tokens(answer)


def _cached_tokens(answer: bytes) -> int:
    try:
        usage = as_object(as_object(from_json(answer)).get("usage"))
    except ValueError:
        raise PrefillGivenUpError("prefill", "bad_answer", "the answer is no JSON") from None
    return as_count(as_object(usage.get("prompt_tokens_details")).get("cached_tokens"))


async def _stop(leg: asyncio.Task[int]) -> None:
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)
