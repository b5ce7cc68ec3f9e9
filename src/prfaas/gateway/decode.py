"""The decode leg: run on one engine, and relayed to the client as it comes."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
from aiohttp import web

from prfaas.errors import EngineError
from prfaas.gateway.answering import error_object, json_response
from prfaas.gateway.bodies import decode_body
from prfaas.gateway.engines import Engine, Engines, EngineUnreachableError
from prfaas.gateway.exchange import Exchange, reply_headers
from prfaas.gateway.jsons import JsonObject, as_object, from_json
from prfaas.gateway.records import Outcome
from prfaas.gateway.sse import DONE, EventReader
from prfaas.gateway.tokenizing import Prompt
from prfaas.gateway.transfers import TransferView


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """Runs decode legs.

    Attributes:
        engines: Posts the leg.
        transfer_timeout_ms: How long the engine waits for blocks on their way.
    """

    engines: Engines
    transfer_timeout_ms: int

    async def run(self, engine: Engine, exchange: Exchange, prompt: Prompt) -> web.StreamResponse:
        """Decode on `engine` and relay its answer, an error included.

        Raises:
            EngineUnreachableError: Nothing has reached the client yet; another engine may be tried.
            EngineError: The engine broke within its answer.
        """
        path, body = decode_body(
            exchange.client,
            prompt,
            # An engine that went down since it was chosen has forgotten its length.
            max_model_len=engine.max_model_len or prompt.num_tokens + 1,
            transfer=self._awaited(exchange.transfer),
        )
        headers = exchange.leg_headers("d")
        async with self.engines.post(engine, path, body, headers) as response:
            if response.status != 200:
                return await _relay_error(response, exchange)
            if exchange.client.stream:
                return await _relay_stream(response, exchange)
            return await _relay_whole(response, exchange)

    def _awaited(self, transfer: TransferView | None) -> JsonObject | None:
        """What the engine's tier has to know of the blocks on their way."""
        if transfer is None:
            return None
        return {
            "transfer": transfer.transfer_id.hex(),
            "source": transfer.source,
            "wait_ms": self.transfer_timeout_ms,
        }


async def _relay_error(response: aiohttp.ClientResponse, exchange: Exchange) -> web.Response:
    """An engine's refusal, as it is; only what is no OpenAI error is put into one."""
    rejected = response.status < 500
    exchange.record.outcome = Outcome.REJECTED if rejected else Outcome.FAILED
    headers = reply_headers(exchange.record)
    try:
        data = await response.read()
    except aiohttp.ClientError:
        data = b""
    if not _is_error_body(data):
        message = f"the engine answers {response.status}"
        error = error_object(message, "EngineError", None, response.status)
        return json_response(error, response.status, headers)
    return web.Response(
        body=data, status=response.status, headers=headers, content_type="application/json"
    )


async def _relay_whole(response: aiohttp.ClientResponse, exchange: Exchange) -> web.Response:
    try:
        answer = as_object(from_json(await response.read()))
    except (aiohttp.ClientError, ValueError) as error:
        raise EngineError(f"the decode engine's answer broke: {type(error).__name__}") from None
    reply = exchange.replies.whole(answer)
    reply["usage"] = exchange.usage.corrected(answer.get("usage"))
    exchange.finish()
    return json_response(reply, headers=reply_headers(exchange.record))


async def _relay_stream(response: aiohttp.ClientResponse, exchange: Exchange) -> web.StreamResponse:
    reader = EventReader(response.content)
    data = await _first_event(reader)
    await exchange.stream.begin(reply_headers(exchange.record))
    while data != DONE:
        chunk = _chunk(data)
        if "error" in chunk:
            exchange.record.outcome = Outcome.FAILED
            return await exchange.stream.fail(chunk)
        for event in _client_chunks(chunk, exchange):
            await exchange.stream.send(event)
        data = await _next_event(reader)
    exchange.finish()
    return await exchange.stream.finish()


def _client_chunks(chunk: JsonObject, exchange: Exchange) -> list[JsonObject]:
    """What the client is sent for a chunk of the engine's; the last one carries the usage."""
    record = exchange.record
    if chunk.get("choices"):
        record.ttft_ns = record.ttft_ns or record.age_ns()
        # As good as it is known before the usage comes.
        record.num_output_tokens += len(chunk["choices"])
        exchange.first_token()
        return exchange.replies.chunks(chunk)
    usage = exchange.usage.corrected(chunk.get("usage"))
    if not exchange.client.include_usage:
        return []
    return exchange.replies.chunks(chunk | {"usage": usage})


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


def _chunk(data: bytes) -> JsonObject:
    try:
        return as_object(from_json(data))
    except ValueError:
        raise EngineError("the decode engine's stream holds an event that is no JSON") from None


def _is_error_body(data: bytes) -> bool:
    try:
        return "error" in as_object(from_json(data))
    except ValueError:
        return False
