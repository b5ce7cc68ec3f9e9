"""One request in its worker: asked for, and carried out as the decider says."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from aiohttp import hdrs, web

from prfaas.config.clusters import ClusterRole
from prfaas.core.kv.hashes import joined
from prfaas.core.request.events import Outcome
from prfaas.gateway.engines.engine import Engine, EngineUnreachableError
from prfaas.gateway.http.errors import UnavailableError
from prfaas.gateway.http.json_codec import from_json
from prfaas.gateway.http.responses import ClientGoneError, ClientStream
from prfaas.gateway.openai.continuing import stop_strings
from prfaas.gateway.openai.requests import Api, ClientRequest
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.serving.decode_leg import DecodeLeg, LegBrokenError, LegFailedError
from prfaas.gateway.serving.request_state import Exchange, StreamedAnswer
from prfaas.gateway.telemetry.tracing import RequestTrace
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt
from prfaas.workers import messages
from prfaas.workers.messages import Message

SLIM_BYTES = 4096
"""The text of a body above this is not sent to the decider, which has its tokens."""
_DECIDED_BY = ("X-Request-Timeout", "traceparent", "tracestate")


class ServedStream(ClientStream):
    """A stream to a client, with headers that the decider gives."""

    headers: Mapping[str, str] = {}

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the head unless it was sent."""
        await super().open({**headers, **self.headers})

    async def write(self, data: bytes, *, is_last: bool) -> web.StreamResponse | None:
        """Send a part; the answer, if it is the last one."""
        try:
            if not is_last:
                await self._started.write(data)
                return None
            await self._started.write_eof(data)
        except ConnectionResetError:
            raise ClientGoneError from None
        return self._started


@dataclass(frozen=True, slots=True)
class FirstDecodeLeg(DecodeLeg):
    """Runs the decode leg of a request that another engine could go on with, if it is a stream."""

    @property
    def has_others(self) -> bool:
        """Return True: the decider has found that there are."""
        return True


class LocalRequest:
    """A request between its client, its worker and the decider.

    Args:
        number: Among those of the worker.
        send: Sends a message to the decider.
    """

    def __init__(
        self,
        number: int,
        exchange: Exchange,
        stream: ServedStream,
        prompt: EncodedPrompt,
        leg: FirstDecodeLeg,
        send: Callable[[Message], None],
    ) -> None:
        self._number, self._exchange, self._stream = number, exchange, stream
        self._prompt, self._run_leg, self._send = prompt, leg, send
        self._waiting: asyncio.Future[None] | None = None
        self._messages: list[Message | None] = []
        self._limit: asyncio.Timeout | None = None
        """Of the leg that runs."""
        self._opening: asyncio.Task[None] | None = None
        self._answer: web.Response | None = None
        """Whole answer of an engine, whose headers the decider still has to tell."""

    def take(self, message: Message | None) -> None:
        """Handle a message of the decider; None if it is gone."""
        if self._limit is not None:
            if isinstance(message, messages.StopLeg):
                self._limit.reschedule(asyncio.get_running_loop().time())
                return
            if isinstance(message, messages.Open | messages.Comment):
                self._opening = asyncio.create_task(self._meanwhile(message))
                return
        self._messages.append(message)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def run(self, headers: Mapping[str, str], named_by: str) -> web.StreamResponse:
        """Have it served; UnavailableError if the decider is gone and nothing was sent.

        Args:
            headers: Of the client.
        """
        try:
            self._ask(headers, named_by)
            while True:
                found = await self._carry_out(await self._next())
                if found is not None:
                    if found.headers.get(hdrs.CONNECTION) == "close":
                        found.force_close()
                    return found
        except (asyncio.CancelledError, ClientGoneError, UnavailableError) as error:
            self._send(messages.Gone(self._number, self._counts))
            if isinstance(error, UnavailableError):
                raise
            # Closes the connection.
            raise asyncio.CancelledError from None

    def _ask(self, headers: Mapping[str, str], named_by: str) -> None:
        record = self._exchange.record
        self._send(
            messages.Ask(
                self._number,
                record.tenant,
                record.request_id,
                {name: headers[name] for name in _DECIDED_BY if name in headers},
                record.started_at_ns,
                record.started_unix_s,
                slim(self._exchange.client),
                [packed(ids) for ids in self._prompt.sequences],
                joined(self._prompt.hashes),
                named_by,
            )
        )

    async def _next(self) -> Message | None:
        if not self._messages:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._messages.pop(0)

    async def _carry_out(self, message: Message | None) -> web.StreamResponse | None:
        """Do what a message says; the answer, if that was all of it."""
        match message:
            case messages.Leg():
                return await self._leg(message)
            case messages.Open() if self._answer is not None:
                self._answer.headers.update(message.headers)
                return self._answer
            case messages.Open() | messages.Comment():
                await self._meanwhile(message)
            case messages.Write():
                sent = await self._stream.write(message.data, is_last=message.is_last)
                self._send(messages.Written(self._number))
                return sent
            case messages.Reply():
                return await self._reply(message)
            case messages.CloseClient():
                raise asyncio.CancelledError
            case None if self._answer is not None:
                return self._answer
            case None if self._stream.is_open:
                raise asyncio.CancelledError
            case None:
                raise UnavailableError("the gateway's deciding process is gone; try again")
        return None

    async def _meanwhile(self, message: messages.Open | messages.Comment) -> None:
        if isinstance(message, messages.Open):
            await self._stream.open(message.headers)
        elif self._stream.is_open:
            await self._stream.comment()

    async def _reply(self, message: messages.Reply) -> web.StreamResponse:
        if self._stream.is_open:
            # The stream had begun when the decider did not know it yet.
            return await self._stream.fail(from_json(message.body))
        return web.Response(body=message.body, status=message.status, headers=message.headers)

    async def _leg(self, order: messages.Leg) -> web.StreamResponse | None:
        """Run the decode leg; the answer, if all of it has been sent."""
        exchange, stream = self._exchange, self._stream
        stream.headers = order.headers
        exchange.trace = RequestTrace(order.trace)
        exchange.usage.cached_max, exchange.usage.cache_end = order.cached_max, order.cache_end
        exchange.answer = (
            StreamedAnswer(stop_strings(exchange.client)) if order.may_continue else None
        )
        exchange.on_first_token = self._first_token
        awaited = None if order.transfer is None else TransferView(*order.transfer)
        engine = Engine(order.engine, order.url, ClusterRole.PD, "", order.rank)
        engine.max_model_len = order.max_model_len
        try:
            async with asyncio.timeout(None) as self._limit:
                answer = await self._run_leg.run(
                    engine, exchange, exchange.client, self._prompt, awaited
                )
        except (EngineUnreachableError, LegBrokenError) as error:
            self._ended(502, broken_by(error))
            return None
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            return None
        finally:
            self._limit = None
        self._ended(200 if answer is None else answer.status)
        if isinstance(answer, web.Response):
            self._answer = answer
            return None
        return answer

    def _ended(self, status: int, broken: messages.Broken | None = None) -> None:
        exchange = self._exchange
        record, answer = exchange.record, exchange.answer
        is_counted = record.cached_tokens is not None
        counts = record.num_prompt_tokens, record.num_output_tokens, record.cached_tokens or 0
        relayed = None
        if broken is not None and answer is not None:
            relayed = answer.token_ids, answer.text, answer.created, answer.finish_reason
        self._send(
            messages.LegEnded(
                self._number,
                status,
                self._counts,
                record.outcome is Outcome.REJECTED,
                counts if is_counted else None,
                exchange.usage.decode_cached or 0,
                self._stream.has_begun,
                broken,
                relayed,
            )
        )

    def _first_token(self) -> None:
        if self._exchange.record.ttft_ns is not None:
            self._send(messages.StreamBegun(self._number, self._counts))

    @property
    def _counts(self) -> messages.StreamedCounts:
        record = self._exchange.record
        return messages.StreamedCounts(
            record.ttft_ns, record.output_at_ns, record.gap_ns, record.num_output_tokens
        )


def broken_by(error: EngineUnreachableError | LegBrokenError) -> messages.Broken:
    """Return an error of a leg as the decider is told it."""
    if isinstance(error, EngineUnreachableError):
        return messages.Broken(str(error), had_request=error.had_request, down=error.reason)
    is_failure = isinstance(error, LegFailedError)
    return messages.Broken(
        str(error), error.reason, error.status, error.body, error.retry_after, is_failure
    )


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as 32 bits each."""
    return (ids if isinstance(ids, array) else array("I", ids)).tobytes()


def slim(client: ClientRequest) -> ClientRequest:
    """Return a request without a long text that its tokens stand for."""
    if (client.num_bytes or 0) <= SLIM_BYTES or client.by_chat_endpoint or not client.is_exact:
        return client
    left_out = "messages" if client.api is Api.CHAT else "prompt"
    body = {name: value for name, value in client.body.items() if name != left_out}
    last = [{"role": message["role"]} for message in client.messages[-1:]]
    prompts = ["." if isinstance(prompt, str) else prompt for prompt in client.prompts]
    return replace(client, body=body, messages=last, prompts=prompts)
