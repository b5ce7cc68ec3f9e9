"""The life of one request: plan, prefill leg, decode leg, and what to do when a leg fails."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from prfaas.config.deployment import ClusterRole
from prfaas.errors import EngineError
from prfaas.gateway.answering import ClientStream, error_object, json_response
from prfaas.gateway.bodies import decode_body
from prfaas.gateway.deciding import Plan, Planner, UnavailableError
from prfaas.gateway.engines import Engine, Engines, EngineUnreachableError
from prfaas.gateway.jsons import JsonObject, as_object, from_json
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.pools import Pools
from prfaas.gateway.prefill import PrefillGivenUpError, PrefillLeg
from prfaas.gateway.records import Fallback, Outcome, Record
from prfaas.gateway.replies import Replies, replies_for
from prfaas.gateway.requests import ClientRequest
from prfaas.gateway.sse import DONE, EventReader
from prfaas.gateway.transfers import Transfers, TransferView
from prfaas.gateway.usage import Usage
from prfaas.wire.frames import TRANSFER_ID_BYTES

NS_PER_MS = 1_000_000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """One request on its way through the gateway.

    Attributes:
        client: What was asked.
        record: Notes what happens.
        stream: Where a stream is written to.
        trace: Headers that go to both legs.
        usage: Corrects the token counts.
        replies: Translates the engine's answer.
        transfer: Blocks on their way; None on the local path, and once given up.
    """

    client: ClientRequest
    record: Record
    stream: ClientStream
    trace: Mapping[str, str]
    usage: Usage = field(init=False)
    replies: Replies = field(init=False)
    transfer: TransferView | None = None

    def __post_init__(self) -> None:
        self.usage = Usage(self.record)
        self.replies = replies_for(self.client, self.record.request_id)

    def leg_headers(self, leg: str) -> dict[str, str]:
        """Headers of a leg, "p" or "d"; nothing else of the client's gets to an engine."""
        return {"X-Request-Id": f"{self.record.request_id}-{leg}", **self.trace}

    def reply_headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return reply_headers(self.record)


def reply_headers(record: Record) -> dict[str, str]:
    """Headers that tell the client where its request went."""
    headers = {"X-Request-Id": record.request_id}
    if record.decision is not None:
        headers["X-Prfaas-Path"] = record.path
        headers["X-Prfaas-Reason"] = record.decision.reason.value
    if record.fallback is not None:
        headers["X-Prfaas-Fallback"] = f"{record.fallback.stage}/{record.fallback.reason}"
    return headers


@dataclass(frozen=True, slots=True)
class Flow:
    """Serves requests.

    Attributes:
        planner: Decides.
        engines: Posts the legs.
        prefill_leg: Runs the prefill leg.
        pools: Hears of given-up transfers.
        transfers: Follows transfers.
        metrics: Counts.
        cache_salt: The tenant's salt.
        transfer_timeout_ms: How long decode waits for blocks.
    """

    planner: Planner
    engines: Engines
    prefill_leg: PrefillLeg
    pools: Pools
    transfers: Transfers
    metrics: Metrics
    cache_salt: str
    transfer_timeout_ms: int

    async def serve(self, exchange: Exchange) -> web.StreamResponse:
        """Answer one request.

        Raises:
            RequestError: The client's fault.
            UnavailableError: No engine could take it.
            EngineError: An engine broke after its answer had begun.
        """
        plan = await self.planner.plan(exchange.client, exchange.record)
        self.metrics.decided(exchange.record)
        try:
            if plan.prefill is not None:
                await self._prefill(exchange, plan, plan.prefill)
            response = await self._decode(exchange, plan)
        finally:
            if exchange.record.outcome is not Outcome.FINISHED:
                self._give_up_transfer(exchange, "the request ended early")
        return response

    async def _prefill(self, exchange: Exchange, plan: Plan, engine: Engine) -> None:
        """Run the prefill leg; on any failure the request goes on without it."""
        record = exchange.record
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        transfer = self.transfers.open(transfer_id, engine.pool, plan.decode.pool)
        exchange.transfer = record.transfer = transfer
        record.prefill_engine = engine.name
        try:
            exchange.usage.cached_max = await self.prefill_leg.run(
                plan, engine, transfer, record, exchange.leg_headers("p")
            )
        except PrefillGivenUpError as error:
            exchange.usage.cached_max = plan.pd_hit_tokens
            self._give_up_transfer(exchange, "the prefill leg was given up")
            self._fall_back(record, error.fallback, str(error))

    async def _decode(self, exchange: Exchange, plan: Plan) -> web.StreamResponse:
        """Run the decode leg, on another engine if the first one can not be reached."""
        try:
            return await self._decode_on(plan.decode, exchange, plan)
        except EngineUnreachableError as error:
            other = self.engines.choose(
                ClusterRole.PD, without={plan.decode.name}, longer_than=plan.prompt.num_tokens
            )
            if other is None:
                raise UnavailableError(f"{error}; no other engine is ready") from None
            self._give_up_transfer(exchange, "the decode engine is gone")
            self._fall_back(exchange.record, Fallback("decode", "unreachable"), str(error))
            exchange.record.decode_engine = other.name
        try:
            return await self._decode_on(other, exchange, plan)
        except EngineUnreachableError as error:
            raise UnavailableError(str(error)) from None

    async def _decode_on(
        self, engine: Engine, exchange: Exchange, plan: Plan
    ) -> web.StreamResponse:
        path, body = decode_body(
            exchange.client,
            plan.prompt,
            cache_salt=self.cache_salt,
            max_model_len=engine.max_model_len or plan.prompt.num_tokens + 1,
            transfer=self._awaited(exchange.transfer),
        )
        headers = exchange.leg_headers("d")
        async with self.engines.post(engine, path, body, headers) as response:
            if response.status != 200:
                return await self._relay_error(response, exchange)
            if exchange.client.stream:
                return await self._relay_stream(response, exchange, plan)
            return await self._relay_whole(response, exchange, plan)

    def _awaited(self, transfer: TransferView | None) -> JsonObject | None:
        """What the decode engine's tier has to know of the blocks on their way."""
        if transfer is None:
            return None
        return {
            "transfer": transfer.transfer_id.hex(),
            "source": transfer.source,
            "wait_ms": self.transfer_timeout_ms,
        }

    async def _relay_error(
        self, response: aiohttp.ClientResponse, exchange: Exchange
    ) -> web.Response:
        """An engine's refusal, as it is; only what is no OpenAI error is put into one."""
        rejected = response.status < 500
        exchange.record.outcome = Outcome.REJECTED if rejected else Outcome.FAILED
        try:
            data = await response.read()
        except aiohttp.ClientError:
            data = b""
        headers = exchange.reply_headers()
        if _is_error_body(data):
            return web.Response(
                body=data, status=response.status, headers=headers, content_type="application/json"
            )
        message = f"the engine answers {response.status}"
        error = error_object(message, "EngineError", None, response.status)
        return json_response(error, response.status, headers)

    async def _relay_whole(
        self, response: aiohttp.ClientResponse, exchange: Exchange, plan: Plan
    ) -> web.Response:
        try:
            answer = as_object(from_json(await response.read()))
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineError(f"the decode engine's answer broke: {type(error).__name__}") from None
        reply = exchange.replies.whole(answer)
        reply["usage"] = exchange.usage.corrected(answer.get("usage"))
        self._finish(exchange, plan)
        return json_response(reply, headers=exchange.reply_headers())

    async def _relay_stream(
        self, response: aiohttp.ClientResponse, exchange: Exchange, plan: Plan
    ) -> web.StreamResponse:
        reader = EventReader(response.content)
        data = await _first_event(reader)
        await exchange.stream.begin(exchange.reply_headers())
        while data != DONE:
            chunk = as_object(from_json(data))
            if "error" in chunk:
                exchange.record.outcome = Outcome.FAILED
                return await exchange.stream.fail(chunk)
            for event in self._client_chunks(chunk, exchange):
                await exchange.stream.send(event)
            data = await _next_event(reader)
        self._finish(exchange, plan)
        return await exchange.stream.finish()

    def _client_chunks(self, chunk: JsonObject, exchange: Exchange) -> list[JsonObject]:
        record = exchange.record
        if chunk.get("choices"):
            record.ttft_ns = record.ttft_ns or record.age_ns()
            return exchange.replies.chunks(chunk)
        usage = exchange.usage.corrected(chunk.get("usage"))
        if not exchange.client.include_usage:
            return []
        return exchange.replies.chunks(chunk | {"usage": usage})

    def _finish(self, exchange: Exchange, plan: Plan) -> None:
        """The answer is complete: judge the transfer by what decode found."""
        record, transfer = exchange.record, exchange.transfer
        record.outcome, record.e2e_ns = Outcome.FINISHED, record.age_ns()
        found = exchange.usage.decode_cached or 0
        if transfer is not None and found < plan.final_tokens:
            message = f"decode found {found} of {plan.final_tokens} tokens"
            self._fall_back(record, Fallback("transfer", transfer.failure), message)

    def _give_up_transfer(self, exchange: Exchange, reason: str) -> None:
        if exchange.transfer is not None:
            self.pools.abort(exchange.transfer, reason)
            exchange.transfer = None

    def _fall_back(self, record: Record, fallback: Fallback, message: str) -> None:
        record.fallback = fallback
        self.metrics.fell_back(record)
        _log.warning(
            "request %s falls back at %s (%s): %s",
            record.request_id,
            fallback.stage,
            fallback.reason,
            message,
        )


async def _first_event(reader: EventReader) -> bytes:
    """Nothing has reached the client yet: an engine that breaks here was never reached."""
    try:
        return await _next_event(reader)
    except EngineError as error:
        raise EngineUnreachableError(str(error)) from None


async def _next_event(reader: EventReader) -> bytes:
    try:
        data = await reader.next()
    except aiohttp.ClientError as error:
        raise EngineError(f"the decode engine's stream broke: {type(error).__name__}") from None
    if data is None:
        raise EngineError("the decode engine's stream ended without its end mark")
    return data


def _is_error_body(data: bytes) -> bool:
    try:
        return "error" in as_object(from_json(data))
    except ValueError:
        return False
