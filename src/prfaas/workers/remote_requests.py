"""The requests of one worker, as the decider runs them.

They go through the service, the machine and the books of every request. Two things are done by the
worker: what is sent to the client, and the first decode leg. A leg that goes on with an answer runs
in the decider, and its text passes through the worker.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aiohttp import web

from prfaas.core.kv.hashes import Hashes
from prfaas.core.request.events import Outcome
from prfaas.gateway.api.auth import RequestAdmission
from prfaas.gateway.api.completions import Asked, CompletionService
from prfaas.gateway.engines.engine import Engine, EngineUnreachableError
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.http.responses import DONE_EVENT, ClientStream
from prfaas.gateway.openai.requests import ClientRequest, MadePrompt
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.serving.decode_leg import DecodeLeg, LegBrokenError, LegFailedError
from prfaas.gateway.serving.request_state import Exchange, reply_headers
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.gateway.tenancy.tenants import Tenants
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt
from prfaas.workers import messages
from prfaas.workers.messages import Message

SENT = web.Response()
"""Answer of a request whose client has got it from the worker."""


class WorkerStream(ClientStream):
    """A stream that a worker sends.

    Args:
        send: Sends a message to the worker.
        headers: Returns the headers of every answer.
    """

    def __init__(
        self,
        number: int,
        record: RequestRecord,
        send: Callable[[Message], None],
        headers: Callable[[], Mapping[str, str]],
    ) -> None:
        super().__init__()
        self.number, self._record, self._send, self._headers = number, record, send, headers
        self._is_open = False
        self._written: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[messages.LegEnded] | None = None
        self._exchange: Exchange | None = None

    @property
    def is_open(self) -> bool:
        """Return True if the head has been sent."""
        return self._is_open

    async def open(self, headers: Mapping[str, str]) -> None:
        """Have the head sent unless it was."""
        if not self._is_open:
            self._is_open = True
            self._send(messages.Open(self.number, {**headers, **self._headers()}))

    async def comment(self) -> None:
        """Have a comment sent while there is no answer."""
        if not self.has_begun:
            self._send(messages.Comment(self.number))

    async def flush(self) -> None:
        """Have what was put sent, and wait until it is."""
        if self._unsent:
            await self._write(self._take())

    async def finish(self) -> web.StreamResponse:
        """Have the end mark sent."""
        await self._write(self._take() + DONE_EVENT, is_last=True)
        return SENT

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        self._written = asyncio.get_running_loop().create_future()
        self._send(messages.Write(self.number, data, is_last))
        await self._written

    def reply(self, response: web.StreamResponse) -> None:
        """Have a whole answer sent, unless the worker has sent one."""
        if response is SENT or not isinstance(response, web.Response):
            return
        body = response.body if isinstance(response.body, bytes) else b""
        headers = {**response.headers, **self._headers()}
        self._send(messages.Reply(self.number, response.status, headers, body))

    async def leg(
        self, engine: Engine, exchange: Exchange, awaited: TransferView | None
    ) -> EndedLeg:
        """Have the decode leg run, and its answer relayed.

        Raises:
            EngineUnreachableError: Nothing of this leg has reached the client.
            LegBrokenError: The engine broke.
        """
        transfer = None
        if awaited is not None:
            transfer = awaited.transfer_id, awaited.source, awaited.destination
        self._exchange = exchange
        self._ended = ended = asyncio.get_running_loop().create_future()
        self._send(
            messages.Leg(
                self.number,
                engine.name,
                engine.url,
                engine.rank,
                engine.max_model_len,
                dict(exchange.trace.headers),
                {**reply_headers(exchange.record), **self._headers()},
                transfer,
                exchange.answer is not None,
                exchange.usage.cached_max,
                exchange.usage.cache_end,
            )
        )
        try:
            found = await ended
        finally:
            self._ended = self._exchange = None
            if not ended.done() or ended.cancelled():
                self._send(messages.StopLeg(self.number))
        return _ended(found, exchange)

    # Messages of the worker

    def take(self, message: messages.StreamBegun | messages.LegEnded | messages.Written) -> None:
        """Handle what the worker reports."""
        match message:
            case messages.Written():
                if self._written is not None and not self._written.done():
                    self._written.set_result(None)
            case messages.StreamBegun():
                self.told(message.counts)
                if self._exchange is not None:
                    self.has_begun = self._is_open = True
                    self._exchange.first_token()
            case messages.LegEnded():
                self.told(message.counts)
                if message.has_begun:
                    self.has_begun = self._is_open = True
                if self._ended is not None and not self._ended.done():
                    self._ended.set_result(message)

    def told(self, counts: messages.StreamedCounts) -> None:
        """The worker has streamed so much."""
        told = counts.ttft_ns, counts.output_at_ns, counts.gap_ns, counts.num_output_tokens
        self._record.streamed_elsewhere(*told)


@dataclass(frozen=True, slots=True)
class EndedLeg:
    """A leg whose answer the client has."""

    status: int

    def close(self) -> None:
        """Nothing is left to close."""


def _ended(found: messages.LegEnded, exchange: Exchange) -> EndedLeg:
    """Note what a worker says of a leg; see `WorkerStream.leg`."""
    if found.usage is not None:
        exchange.record.counted(*found.usage)
    exchange.usage.decode_cached = found.decode_cached
    if found.has_begun:
        exchange.replies.opened = True
    if (broken := found.broken) is not None:
        if exchange.answer is not None and found.relayed is not None:
            exchange.answer.told(*found.relayed)
        if not broken.reason:
            raise EngineUnreachableError(
                broken.said, had_request=broken.had_request, reason=broken.down
            )
        kind = LegFailedError if broken.is_failure else LegBrokenError
        raise kind(broken.reason, broken.said, broken.status, broken.body, broken.retry_after)
    if found.is_refused:
        exchange.record.ended(Outcome.REJECTED)
    else:
        exchange.finish()
    return EndedLeg(found.status)


@dataclass(frozen=True, slots=True)
class WorkerDecodeLeg(DecodeLeg):
    """Runs decode legs: the first of a request in its worker, others here."""

    counted: Engines
    """Counts those in workers."""

    async def run(
        self,
        engine: Engine,
        exchange: Exchange,
        client: ClientRequest,
        prompt: EncodedPrompt,
        awaited: TransferView | None,
    ) -> web.StreamResponse | None:
        """Decode on `engine`; see `DecodeLeg.run`."""
        stream = exchange.stream
        if not isinstance(stream, WorkerStream) or stream.has_begun or exchange.has_tokens:
            return await DecodeLeg.run(self, engine, exchange, client, prompt, awaited)
        try:
            async with self.counted.leg(engine, stream.leg(engine, exchange, awaited)):
                if not stream.has_begun:
                    # A whole answer, which shows how it has ended.
                    await stream.open(reply_headers(exchange.record))
                return SENT
        except EngineUnreachableError as error:
            if error.reason:
                self.counted.probes.mark_down(engine, error.reason)
            raise


class RemoteRequests:
    """The requests of one worker.

    Args:
        service: Runs them.
        send: Sends a message to the worker.
    """

    def __init__(
        self,
        service: CompletionService,
        admission: RequestAdmission,
        tenants: Tenants,
        send: Callable[[Message], None],
    ) -> None:
        self._service, self._admission, self._tenants = service, admission, tenants
        self._send = send
        self._open: dict[int, tuple[asyncio.Task[None], WorkerStream]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def take(
        self,
        message: messages.Ask
        | messages.StreamBegun
        | messages.LegEnded
        | messages.Written
        | messages.Gone,
    ) -> None:
        """Handle a message about a request."""
        if isinstance(message, messages.Ask):
            self._begin(message)
        elif (found := self._open.get(message.number)) is not None:
            task, stream = found
            if isinstance(message, messages.Gone):
                stream.told(message.counts)
                task.cancel()
            else:
                stream.take(message)

    async def end(self, seconds: float = 0.0) -> None:
        """End those that do not end by themselves in this time, seconds."""
        tasks = [task for task, _ in self._open.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, ask: messages.Ask) -> None:
        tenant = self._tenants.by_name[ask.tenant]
        record = RequestRecord(
            ask.request_id,
            ask.client.api.value,
            tenant.name,
            started_at_ns=ask.started_at_ns,
            started_unix_s=ask.started_unix_s,
        )
        stream = WorkerStream(
            ask.number, record, self._send, lambda: self._admission.headers(tenant)
        )
        sequences = [array("I", ids) for ids in ask.sequences]
        made = MadePrompt(sequences, Hashes(ask.hashes), ask.named_by)
        client = replace(ask.client, made=made)

        async def read() -> ClientRequest:
            return client

        asked = Asked(tenant, ask.headers, read)
        task = asyncio.create_task(self._run(ask.number, asked, record, stream))
        self._open[ask.number] = task, stream

    async def _run(
        self, number: int, asked: Asked, record: RequestRecord, stream: WorkerStream
    ) -> None:
        try:
            stream.reply(await self._service.serve(asked, record, stream))
        except asyncio.CancelledError:
            self._send(messages.CloseClient(number))
            raise
        finally:
            del self._open[number]
