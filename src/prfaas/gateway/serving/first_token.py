"""The first tokens of an answer, from the engine that prefills: the client gets them at once.

The engine that decodes goes on from them (`StreamHandover.seam`), as from the tokens of an engine
that broke. There is one token, or as many as are made until the blocks are there (relay decode).

In a stream there are events with tokens, and one with the usage. An engine that does not tell its
token ids gives no token.
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
    """Takes the first tokens of an answer from a prefill leg."""

    exchange: Exchange
    answer: StreamedAnswer
    """Of the request; nothing of it has come."""
    num_tokens: int
    """Most tokens that the leg makes: one, or more if it is to relay."""
    is_last: bool
    """No further token is asked for."""
    on_token: Callable[[], None]
    """Called when the client has the first one, and another engine is to go on."""

    async def read(self, response: aiohttp.ClientResponse) -> int | web.StreamResponse:
        """Relay the tokens of a leg.

        Returns:
            The answer if it ends with them; otherwise the prompt's tokens that were cached.

        Raises:
            LegBrokenError: The engine broke, within its stream.
            ValueError: The answer is no JSON.
        """
        if self.exchange.client.stream:
            return await self._read_stream(response)
        whole = as_object(from_json(await read_answer(response)))
        ends = self._begin(whole, _choice_of(whole))
        if ends:
            return whole_reply(whole, self.exchange)
        if ends is not None:
            self.answer.take(whole)
            self.on_token()
        return cached_in(whole)

    async def _read_stream(self, response: aiohttp.ClientResponse) -> int | web.StreamResponse:
        exchange, reader, cached_tokens = self.exchange, EventReader(response.content), 0
        data = await next_event(reader)
        while data != DONE:
            chunk = chunk_of(data)
            has_begun, choice = exchange.answer is not None, _choice_of(chunk)
            if has_begun:
                self._check(chunk, choice)
                ends: bool | None = self.answer.cut(choice, is_last=self.is_last)
            else:
                ends = self._begin(chunk, choice)
            if ends:
                # The leg reports itself what it found.
                exchange.usage.cached_max = None
                await self._send()
                await relay_events(reader, to_json(chunk), exchange)
                return await end_stream(exchange)
            if not choice:
                cached_tokens = max(cached_tokens, cached_in(chunk))
            elif ends is None:
                if self.num_tokens > 1 and not isinstance(choice.get("token_ids"), list):
                    return cached_tokens  # Nobody could go on from tokens that it does not tell.
                self.answer.take(chunk)
            else:
                for event in client_chunks(chunk, exchange):
                    exchange.stream.put(event)
                if not has_begun:
                    self.on_token()
                    await self._send()
                elif not reader.ready:
                    await exchange.stream.flush()
            data = await next_event(reader)
        self._leave()
        return cached_tokens

    def _leave(self) -> None:
        """The leg has ended, and nothing that it said ended the answer."""
        if self.exchange.answer is None:
            self.answer.token_ids.clear()
        elif self.is_last and len(self.answer.token_ids) >= self.num_tokens:
            self.answer.finish_reason = "length"  # Its engine gave no reason.

    def _begin(self, chunk: JsonObject, choice: JsonObject) -> bool | None:
        """See `StreamedAnswer.begin`; LegBrokenError if it is an error."""
        if "error" in chunk:
            code = as_count(as_object(chunk["error"]).get("code"))
            raise LegFailedError("error", "the engine failed within its stream", code)
        self._check(chunk, choice)
        is_only = self.is_last and self.num_tokens == 1
        ends = True if is_only else self.answer.begin(choice, is_last=self.is_last)
        if ends is not None:
            self.exchange.answer = self.answer
            self.exchange.record.early("", is_given=True)
            if ends:
                self.exchange.usage.cached_max = None
        return ends

    def _check(self, chunk: JsonObject, choice: JsonObject) -> None:
        """LegBrokenError if the engine does not go on with the answer."""
        if "error" in chunk:
            raise LegBrokenError("broken", "the engine failed after its token")
        if choice.get("finish_reason") in _GIVEN_UP:
            raise LegBrokenError("broken", "the engine gave its prefill up")

    async def _send(self) -> None:
        """Send the head and what there is, which nobody may do in part: the leg may be stopped."""
        stream = self.exchange.stream

        async def send() -> None:
            await stream.begin(reply_headers(self.exchange.record))
            await stream.flush()

        await asyncio.shield(send())


def _choice_of(chunk: JsonObject) -> JsonObject:
    """The choice of a chunk, with the ids of its tokens; empty without one."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return {}
    choice = as_object(choices[0])
    _name_ids(choice)
    return choice


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
