"""The first token of an answer, from the engine that prefills: the client gets it at once.

The engine that decodes goes on from it (`StreamHandover.seam`), as from the tokens of an engine
that broke.

In a stream there is an event with the token, and one with the usage. An engine that does not tell
its token ids gives no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from prfaas.gateway.http.json_codec import JsonObject, as_count, as_object, from_json, to_json
from prfaas.gateway.http.responses import DONE, EventReader, read_answer
from prfaas.gateway.serving.decode_leg import (
    LegBrokenError,
    LegFailedError,
    chunk_of,
    client_chunks,
    end_stream,
    next_event,
    relay_events,
    whole_reply,
)
from prfaas.gateway.serving.request_state import Exchange, StreamedAnswer, reply_headers

TELL_IDS: JsonObject = {"logprobs": 0, "return_tokens_as_token_ids": True}
"""Has an engine tell the ids of its tokens alone. `return_token_ids` brings those of the prompt as
well, and the client would wait until they have crossed the link."""
_ID = "token_id:"
_GIVEN_UP = ("abort", "error")
"""Reasons of an end that is none of the answer: another engine can give it."""


@dataclass(frozen=True, slots=True)
class EarlyToken:
    """Takes the first token of an answer from a prefill leg.

    Attributes:
        answer: Of the request; nothing of it has come.
        is_last: No further token is asked for.
        on_token: Called when the client has the token, and another engine is to go on.
    """

    exchange: Exchange
    answer: StreamedAnswer
    is_last: bool
    on_token: Callable[[], None]

    async def read(self, response: aiohttp.ClientResponse) -> int | web.StreamResponse:
        """Relay the token of a leg.

        Returns:
            The answer if it ends with the token; otherwise the prompt's tokens that were cached.

        Raises:
            LegBrokenError: The engine broke, within its stream.
            ValueError: The answer is no JSON.
        """
        if self.exchange.client.stream:
            return await self._read_stream(response)
        whole = as_object(from_json(await read_answer(response)))
        ends = self._begin(whole)
        if ends:
            return whole_reply(whole, self.exchange)
        if ends is not None:
            self.answer.take(whole)
            self.on_token()
        return cached_in(whole)

    async def _read_stream(self, response: aiohttp.ClientResponse) -> int | web.StreamResponse:
        exchange, reader = self.exchange, EventReader(response.content)
        chunk = chunk_of(await next_event(reader))
        ends = self._begin(chunk)
        if ends:
            await self._open()
            await relay_events(reader, to_json(chunk), exchange)
            return await end_stream(exchange)
        if ends is not None:
            for event in client_chunks(chunk, exchange):
                exchange.stream.put(event)
            self.on_token()
            await self._open()
            await exchange.stream.flush()
        cached_tokens = 0
        while (data := await next_event(reader)) != DONE:
            chunk = chunk_of(data)
            if "error" in chunk:
                raise LegBrokenError("broken", "the engine failed after its token")
            cached_tokens = max(cached_tokens, cached_in(chunk))
        return cached_tokens

    def _begin(self, chunk: JsonObject) -> bool | None:
        """See `StreamedAnswer.begin`; LegBrokenError if it is an error."""
        if "error" in chunk:
            code = as_count(as_object(chunk["error"]).get("code"))
            raise LegFailedError("error", "the engine failed within its stream", code)
        choices = chunk.get("choices")
        choice = as_object(choices[0]) if isinstance(choices, list) and choices else {}
        if choice.get("finish_reason") in _GIVEN_UP:
            raise LegBrokenError("broken", "the engine gave its prefill up")
        _name_ids(choice)
        ends = self.answer.begin(choice, is_last=self.is_last)
        if ends is not None:
            self.exchange.answer = self.answer
            self.exchange.record.early("", is_given=True)
            if ends:
                # The leg reports itself what it found.
                self.exchange.usage.cached_max = None
        return ends

    async def _open(self) -> None:
        """Send the head, which nobody may do in part: the leg may be cancelled."""
        stream = self.exchange.stream
        await asyncio.shield(stream.begin(reply_headers(self.exchange.record)))


def _name_ids(choice: JsonObject) -> None:
    """Put the ids of a choice's tokens, which came as `TELL_IDS` asks for, where engines put them
    that are asked for all ids."""
    tokens = as_object(choice.get("logprobs")).get("tokens")
    choice["logprobs"] = None
    if isinstance(tokens, list) and all(str(token).startswith(_ID) for token in tokens):
        numbers = [str(token).removeprefix(_ID) for token in tokens]
        choice["token_ids"] = [int(number) for number in numbers if number.isdecimal()]


def cached_in(answer: JsonObject) -> int:
    """Prompt tokens that an engine reports as cached."""
    usage = as_object(answer.get("usage"))
    return as_count(as_object(usage.get("prompt_tokens_details")).get("cached_tokens"))
