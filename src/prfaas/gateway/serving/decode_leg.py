"""The decode leg: run on one engine, and relayed to the client as it comes; the end of a stream
that its engine left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web

from prfaas.core.request.events import Outcome
from prfaas.errors import EngineError
from prfaas.gateway.engines.engine import INTERNAL_ERROR, Engine, SuspectError
from prfaas.gateway.engines.engine_connections import EngineConnections
from prfaas.gateway.http.errors import error_body, retry_headers
from prfaas.gateway.http.json_codec import JsonObject, as_count, as_object, from_json, to_json
from prfaas.gateway.http.responses import (
    DONE,
    AnswerTooLongError,
    EventReader,
    error_object,
    json_response,
    read_answer,
)
from prfaas.gateway.openai.continuing import rest_of
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.serving.leg_requests import decode_body, wait_order
from prfaas.gateway.serving.request_state import Exchange, StreamedAnswer, reply_headers
from prfaas.gateway.serving.routing_step import RoutedPrompt
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt, PromptMaker
from prfaas.gateway.tokenization.text_encoder import NoDetokenizerError

_PROMPT_IDS = b'"prompt_token_ids":['
_ERROR = b'{"error"'


BROKEN = 502
"""Status of a leg with a broken connection or an invalid answer."""


class LegBrokenError(EngineError):
    """The engine cannot continue with a request; another one may.

    Attributes:
        reason: One of a bounded set; labels a metric.
        status: HTTP status, if the engine gave one.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        status: int = BROKEN,
        body: bytes = b"",
        retry_after: str = "",
    ) -> None:
        super().__init__(message)
        self.reason, self.status, self.body = reason, status, body
        self.retry_after = retry_after


class LegFailedError(LegBrokenError, SuspectError):
    """The engine reported a failure of this request."""


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """Runs decode legs."""

    engines: EngineConnections
    transfer_timeout_ms: int
    """Time that the engine waits for blocks in transit."""

    async def run(
        self,
        engine: Engine,
        exchange: Exchange,
        client: ClientRequest,
        prompt: EncodedPrompt,
        awaited: TransferView | None,
    ) -> web.StreamResponse | None:
        """Decode on `engine` and relay its answer, an error included.

        Args:
            client: What of it is left to do.
            prompt: All tokens so far.
            awaited: Blocks in transit to `engine`.

        Returns:
            The answer; None if the gateway ended it before the engine did.

        Raises:
            EngineUnreachableError: Nothing of this leg has reached the client.
            LegBrokenError: The engine broke; `exchange.stream` shows if the client has received
                something.
        """
        path, body = decode_body(
            client,
            prompt,
            max_model_len=engine.max_model_len,
            transfer=wait_order(awaited, self.transfer_timeout_ms),
            with_ids=exchange.answer is not None and (self.has_others or exchange.has_tokens),
        )
        headers = exchange.leg_headers("d")
        async with self.engines.post(engine, path, body, headers) as response:
            del body, headers
            if response.status >= 500:
                raise await _refusal(response)
            if response.status != 200:
                exchange.record.ended(Outcome.REJECTED)
                return await refuse(await _refusal(response), exchange)
            if client.stream:
                return await _relay_stream(response, exchange)
            return await _relay_whole(response, exchange)

    @property
    def has_others(self) -> bool:
        """Return True if there is more than one engine that decodes, up or down."""
        return self.engines.num_decoding > 1


async def _refusal(response: aiohttp.ClientResponse) -> LegBrokenError:
    said = f"the engine answers {response.status}"
    after = response.headers.get("Retry-After", "")
    label = f"status_{min(response.status // 100, 5)}xx"
    kind = LegFailedError if response.status == INTERNAL_ERROR else LegBrokenError
    return kind(label, said, response.status, await _body(response), after)


def _failed_within(data: bytes) -> LegFailedError:
    """An engine's stream has this error event."""
    said = "the decode engine failed within its stream"
    return LegFailedError("error", said, INTERNAL_ERROR, data)


def _too_long(error: AnswerTooLongError) -> LegFailedError:
    """By the engine's fault or the request's: one may ask for that much."""
    said = f"{error}; ask for fewer tokens, choices or log probabilities"
    return LegFailedError("error", said, body=to_json(error_body(EngineError(said))))


async def _body(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await read_answer(response)
    except (aiohttp.ClientError, AnswerTooLongError):
        return b""


async def refuse(refusal: LegBrokenError, exchange: Exchange) -> web.StreamResponse:
    """An engine's refusal, as it is; only what is no OpenAI error is put into one."""
    body, status = refusal.body, refusal.status
    headers = {**reply_headers(exchange.record), **retry_headers(status, refusal.retry_after)}
    error: object = error_object(f"the engine answers {status}", "EngineError", None, status)
    if is_error := _is_error_body(body):
        error = from_json(body)
    if exchange.stream.is_open:
        return await exchange.stream.fail(error)
    if not is_error:
        return json_response(error, status, headers)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def _relay_whole(response: aiohttp.ClientResponse, exchange: Exchange) -> web.Response:
    try:
        answer = as_object(from_json(await read_answer(response)))
    except AnswerTooLongError as error:
        raise _too_long(error) from None
    except (aiohttp.ClientError, ValueError) as error:
        said = f"the decode engine's answer broke: {type(error).__name__}"
        raise LegBrokenError("broken", said) from None
    return whole_reply(answer, exchange)


def whole_reply(answer: JsonObject, exchange: Exchange) -> web.Response:
    """The answer to a client that wants no stream, from its last engine's."""
    if exchange.answer is not None:
        for choice in exchange.answer.take(answer).get("choices") or ():
            choice["text"] = exchange.answer.text
    reply = exchange.replies.whole(answer)
    reply["usage"] = exchange.usage.corrected(answer.get("usage"))
    exchange.finish()
    return json_response(reply, headers=reply_headers(exchange.record))


async def _relay_stream(
    response: aiohttp.ClientResponse, exchange: Exchange
) -> web.StreamResponse | None:
    reader = EventReader(response.content)
    data = await next_event(reader)
    if exchange.answer is not None:
        data = without_prompt_ids(data)
    if not exchange.stream.has_begun:
        if data.startswith(_ERROR) and _refused_in(data) is None:
            raise _failed_within(data)
        await exchange.stream.begin(reply_headers(exchange.record))
    if (refused := _refused_in(data)) is not None:
        exchange.record.ended(Outcome.REJECTED)
        return await exchange.stream.fail(refused)
    try:
        is_over = await relay_events(reader, data, exchange)
    except LegBrokenError:
        _put_held(exchange)
        await exchange.stream.flush()
        raise
    if not is_over:
        response.close()
        return None
    return await end_stream(exchange)


async def end_stream(exchange: Exchange) -> web.StreamResponse:
    """All of a stream has come."""
    _put_held(exchange)
    exchange.finish()
    return await exchange.stream.finish()


def _put_held(exchange: Exchange) -> None:
    for event in exchange.take_held():
        exchange.stream.put(event)


def _refused_in(data: bytes) -> JsonObject | None:
    """The error by which vLLM refuses a request after the head of its stream, if it is one."""
    if not data.startswith(_ERROR):
        return None
    chunk = chunk_of(data)
    is_refusal = 400 <= as_count(as_object(chunk["error"]).get("code")) < 500
    return chunk if is_refusal else None


async def relay_events(reader: EventReader, data: bytes, exchange: Exchange) -> bool:
    """Relay a stream from its first event on; whether that was all of it."""
    while data != DONE:
        is_usage = _put_event(data, exchange)
        if exchange.answer is not None and exchange.answer.stop_end is not None:
            return False
        if reader.ready:
            data = reader.ready.pop()
            continue
        await exchange.stream.flush()
        data = b""  # Nothing is kept while a stream waits.
        try:
            data = await next_event(reader)
        except LegBrokenError:
            if not is_usage:
                raise
            break  # The usage has come, and nothing but the end mark is missing.
    return True


def _put_event(data: bytes, exchange: Exchange) -> bool:
    """Put what an event has for the client, and return True if it is the usage."""
    chunk = chunk_of(data)
    if "error" in chunk:
        raise _failed_within(data)
    for event in client_chunks(chunk, exchange):
        exchange.stream.put(event)
    return not chunk.get("choices")


def client_chunks(chunk: JsonObject, exchange: Exchange) -> list[JsonObject]:
    """Convert a chunk of the engine for the client; the last one has the usage."""
    if exchange.answer is not None:
        is_repeated = exchange.answer.is_repeated
        chunk = exchange.answer.take(chunk)
        choices = chunk.get("choices") or ()
        if (
            is_repeated
            and choices
            and not any(each["text"] or each["finish_reason"] for each in choices)
        ):
            exchange.first_token()
            return []
    if chunk.get("choices"):
        exchange.record.streamed(len(chunk["choices"]))
        exchange.first_token()
        if "usage" in chunk:
            chunk["usage"] = exchange.usage.shifted(chunk["usage"])
        events = exchange.replies.chunks(chunk)
        if exchange.client.include_usage or not _is_end(chunk):
            return events
        # Without a usage chunk, vLLM's fingerprint is in the last one of each answer. The gateway
        # asks for usage always, which brings the fingerprint right after the last token.
        exchange.held.append(events.pop())
        return events
    usage = exchange.usage.corrected(chunk.get("usage"))
    if not exchange.client.include_usage:
        return exchange.take_held(chunk.get("system_fingerprint"))
    return exchange.replies.chunks(chunk | {"usage": usage})


def _is_end(chunk: JsonObject) -> bool:
    return any(choice.get("finish_reason") is not None for choice in chunk["choices"])


async def next_event(reader: EventReader) -> bytes:
    """The data of the next event of an engine's stream; LegBrokenError if it breaks."""
    try:
        data = await reader.next()
    except aiohttp.ClientError as error:
        said = f"the decode engine's stream broke: {type(error).__name__}"
        raise LegBrokenError("broken", said) from None
    except AnswerTooLongError as error:
        raise _too_long(error) from None
    if data is None:
        raise LegBrokenError("broken", "the decode engine's stream ended without its end mark")
    return data


def without_prompt_ids(data: bytes) -> bytes:
    """The first event without the prompt, which nobody asked for, before it is parsed.

    Within a string of JSON the quote would have a backslash before it.
    """
    start = data.find(_PROMPT_IDS) + len(_PROMPT_IDS)
    end = data.find(b"]", start)
    return data if start < len(_PROMPT_IDS) or end < 0 else data[:start] + data[end:]


def chunk_of(data: bytes) -> JsonObject:
    """The object of an event; LegBrokenError if it is none."""
    try:
        return as_object(from_json(data))
    except ValueError:
        said = "the decode engine's stream holds an event that is no JSON"
        raise LegBrokenError("broken", said) from None


def _is_error_body(data: bytes) -> bool:
    try:
        return "error" in as_object(from_json(data))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class StreamHandover:
    """Continues and ends streams."""

    prompts: PromptMaker
    model: str

    async def seam(
        self, exchange: Exchange, plan: RoutedPrompt
    ) -> tuple[ClientRequest, EncodedPrompt]:
        """Rest of a stream after the loss of its engine; EngineError if it is unknown which text
        the client has.

        Returns:
            The rest of the request, and its prompt with the tokens so far. Nothing is left if the
            engine held back a stop string: `exchange.is_answered`.
        """
        answer = exchange.answer
        assert answer is not None  # noqa: S101 (others are not continued)
        try:
            if answer.first_text is not None and len(answer.token_ids) == 1:
                texts = [answer.first_text]
            elif (told := answer.pieces) is not None:
                texts = told
            else:
                texts = await self._texts(exchange, plan, answer)
            num_moved = answer.move(texts)
        except (NoDetokenizerError, ValueError) as error:
            raise EngineError(
                f"the decode engine broke, and no other can continue: {error}"
            ) from None
        if answer.is_stopped:
            await self._say(exchange, {"choices": [{"index": 0, "text": "", "logprobs": None}]})
        exchange.usage.num_moved = num_moved
        if exchange.usage.cached_max is None:
            exchange.usage.cached_max = plan.routed.present_tokens
        ids = [*plan.prompt.token_ids, *answer.token_ids]
        return rest_of(exchange.client, num_moved), replace(plan.prompt, sequences=[ids])

    async def end(self, exchange: Exchange, plan: RoutedPrompt) -> web.StreamResponse:
        """Send what comes after the last token: usage and the end mark."""
        answer = exchange.answer
        assert answer is not None  # noqa: S101 (others end with their engine)
        num_tokens = len(answer.token_ids)
        if answer.stop_end is not None:
            ends = itertools.accumulate(map(len, await self._texts(exchange, plan, answer)))
            num_tokens = 1 + sum(end < answer.stop_end for end in ends)
        exchange.usage.num_moved, cached = 0, exchange.usage.cached_max
        cached = plan.routed.present_tokens if cached is None else cached
        usage = {
            "prompt_tokens": plan.prompt.num_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": plan.prompt.num_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await self._say(exchange, {"choices": [], "usage": usage})
        # Its engine was not heard to the end: nothing is known to be missing.
        exchange.usage.decode_cached = plan.route.final_tokens
        exchange.finish()
        return await exchange.stream.finish()

    async def _say(self, exchange: Exchange, chunk: JsonObject) -> None:
        model = exchange.client.body.get("model", self.model)
        head = {"object": "text_completion", "model": model}
        for event in client_chunks(head | chunk, exchange):
            await exchange.stream.send(event)

    async def _texts(
        self, exchange: Exchange, plan: RoutedPrompt, answer: StreamedAnswer
    ) -> list[str]:
        skip = exchange.client.body.get("skip_special_tokens") is not False
        prompts, prompt_ids = self.prompts, plan.prompt.token_ids
        tenant = exchange.tenant
        return await prompts.texts(prompt_ids, answer.token_ids, tenant, skip_special=skip)
