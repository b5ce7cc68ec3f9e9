"""A worker process: `python -m prfaas.workers.worker`, started by a gateway, which tells it by its
standard input who it is, and by its channel where to listen, once the gateway itself can serve."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import pickle
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web

from prfaas.config.deployment import Deployment
from prfaas.core.admission.quotas import Limit
from prfaas.errors import ConfigError, PrfaasError, RequestError
from prfaas.gateway.api.auth import is_for_clients, shown_key
from prfaas.gateway.api.completions import DeployedDefaults, as_deployed
from prfaas.gateway.engines.engine_connections import EngineConnections
from prfaas.gateway.http.connections import (
    BACKLOG,
    ClientConnections,
    ClientTls,
    Closed,
    connections_max,
)
from prfaas.gateway.http.errors import (
    REASON_HEADER,
    UnavailableError,
    error_response,
    openai_errors,
)
from prfaas.gateway.http.request_body import (
    BODY_TIMEOUT_S,
    KEEPS_BODY,
    Origins,
    read,
    request_id,
)
from prfaas.gateway.openai.requests import Api, ClientRequest, parse_request
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.gateway.telemetry.tracing import RequestTrace
from prfaas.gateway.tenancy.tenants import Tenant, Tenants
from prfaas.gateway.tokenization.known_prefixes import Naming
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt, PromptMaker
from prfaas.logs import LogFormat, set_up_logging
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_MS, NS_PER_S
from prfaas.wire.identity import identity_in
from prfaas.wire.renewal import Renewal
from prfaas.wire.sockets import raise_descriptor_limit
from prfaas.workers import messages
from prfaas.workers.handing_on import HandingOn
from prfaas.workers.local_requests import FirstDecodeLeg, LocalRequest, ServedStream
from prfaas.workers.messages import WorkerChannel

BEAT_S, HUNG_S = 1.0, 5.0
PATH_BYTES, LISTENING_MAX = 128, 16
"""Length of the message that tells a worker the decider's socket, and descriptors with it."""
END_S = 1.0
"""Time for what was handed on to end, once all else has."""
SERVED_HERE = web.RequestKey("served_here", bool)
_USED_UP = (Limit.REQUESTS, Limit.TOKENS)
_HUNG = "the gateway's deciding process does not answer; try again"


@dataclass(frozen=True, slots=True)
class Start:
    """All that a worker has to know.

    Attributes:
        channel: Descriptor that it inherits.
        beat_s: Time between two messages that both sides are well, seconds.
        hung_s: A decider that does not answer for this time gets no requests, seconds.
    """

    deployment: Deployment
    channel: int
    log_form: LogFormat
    log_level: int
    beat_s: float = BEAT_S
    hung_s: float = HUNG_S


class Worker:
    """Takes connections, and serves their requests with the decider; ConfigError if the tokenizer,
    an identity or the salt is missing."""

    def __init__(self, start: Start) -> None:
        self._start, self._deployment = start, start.deployment
        self._defaults = DeployedDefaults(start.deployment)
        table = self._deployment.gateway
        self._model = self._deployment.model.name
        self._identity = identity_in(self._deployment.security.identities, table.name)
        self._tls = self._identity.host_context()
        self._tenants = Tenants(self._deployment)
        self._prompts = PromptMaker(
            self._deployment.model.path, is_shared=len(self._tenants.by_name) > 1
        )
        self._engines = EngineConnections(self._tls, table.connect_timeout / NS_PER_S)
        timeout_ms = self._deployment.routing.transfer_timeout // NS_PER_MS
        self._leg = FirstDecodeLeg(self._engines, timeout_ms)
        self._client_tls = ClientTls.of(table.tls)
        self._metrics = GatewayMetrics()
        self._closed = Counter[str]()
        self._facts = messages.PromptFacts()
        self._requests: dict[int, LocalRequest] = {}
        self._refused_until: dict[str, float] = {}
        """When a tenant that has used up its limits may be served again: until then the decider
        refuses it, and nothing is tokenised for it."""
        self._numbers = itertools.count()
        self._asked_at: float | None = None
        """Time of the oldest message that the decider has not answered."""
        self._leaving = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_inside = 0
        self._is_lost = False

    async def run(self, decider: Path, listening: Sequence[int]) -> None:
        """Serve until the decider ends it, or is gone.

        Args:
            decider: Socket of the decider's HTTP server.
            listening: Descriptors.
        """
        self._handing_on = HandingOn(decider)
        loop = asyncio.get_running_loop()
        table = self._deployment.gateway
        Renewal(
            self._identity, table.name, self._renew_identity, self._metrics.identity_ends
        ).watch()
        self._engines.start_session()
        self._handing_on.start()
        runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=END_S
        )
        await runner.setup()
        if runner.server is None:
            raise RuntimeError("the server was not set up")
        tls = None if self._client_tls is None else self._client_tls.context
        self._connections = ClientConnections(
            runner.server, connections_max(table.requests_max), tls
        )
        self._connections.on_closed = self._count_closed
        self._channel = WorkerChannel(messages.OfDecider, self)
        await loop.create_unix_connection(
            lambda: self._channel, sock=socket.socket(fileno=self._start.channel)
        )
        listeners = [await self._listen(number) for number in listening]
        self._channel.send(messages.Ready())
        tasks = [asyncio.create_task(self._beat())]
        if self._client_tls is not None:
            tasks.append(asyncio.create_task(self._client_tls.watch()))
        await self._leaving.wait()
        for listener in listeners:
            listener.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(table.drain_timeout / NS_PER_S):
                await self._idle.wait()
        await cancel_all(tasks)
        await self._connections.stop()
        await runner.cleanup()
        await self._engines.close()
        await self._handing_on.close()
        self._prompts.close()
        self._channel.close()

    async def _listen(self, number: int) -> asyncio.Server:
        """Accept one connection a turn of the event loop: a burst is for all workers."""
        listener = socket.socket(fileno=number)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._connections, sock=listener, backlog=1)
        listener.listen(BACKLOG)
        return server

    def take(self, message: Any) -> None:
        """Handle a message of the decider."""
        match message:
            case messages.PromptFacts():
                self._facts = message
                self._prompts.renderer.takes_parts = message.takes_parts
            case messages.Answered():
                self._asked_at = None
            case messages.StopListening():
                self._leaving.set()
            case _:
                if (found := self._requests.get(message.number)) is not None:
                    found.take(message)

    def lost(self) -> None:
        """The decider is gone: what runs at an engine runs to its end, and nothing new begins."""
        self._is_lost = True
        self._leaving.set()
        for request in self._requests.values():
            request.take(None)

    def _renew_identity(self) -> None:
        self._identity.refresh(self._tls, self._identity.client_context())
        if self._client_tls is not None:
            self._client_tls.renew()

    def _count_closed(self, why: Closed) -> None:
        self._closed[why.value] += 1

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._channel.send(messages.Beat(self._connections.num_open, dict(self._closed)))
            if self._asked_at is None:
                self._asked_at = loop.time()
            await asyncio.sleep(self._start.beat_s)
            if self._is_hung:
                for request in self._requests.values():
                    request.take(None)

    @property
    def _is_hung(self) -> bool:
        asked_at = self._asked_at
        waited_s = 0.0 if asked_at is None else asyncio.get_running_loop().time() - asked_at
        return self._is_lost or waited_s > self._start.hung_s

    # HTTP

    def _app(self) -> web.Application:
        table = self._deployment.gateway
        app = web.Application(
            middlewares=[openai_errors, self._inside], client_max_size=table.body_bytes_max
        )
        app[BODY_TIMEOUT_S] = table.body_timeout / NS_PER_S
        app[KEEPS_BODY] = True
        if table.allowed_origins:
            origins = Origins(table.allowed_origins, is_for_clients)

            async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
                # What is handed on has them.
                if SERVED_HERE in request:
                    await origins.add_headers(request, response)

            app.on_response_prepare.append(add_headers)
        app.router.add_post("/v1/chat/completions", partial(self._generate, api=Api.CHAT))
        app.router.add_post("/v1/completions", partial(self._generate, api=Api.COMPLETIONS))
        app.router.add_route("*", "/{path:.*}", self._handing_on.hand_on)
        return app

    @web.middleware
    async def _inside(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._is_hung:
            raise UnavailableError(_HUNG)
        found: web.StreamResponse = await handler(request)
        if self._is_lost:
            found.force_close()
        return found

    async def _generate(self, request: web.Request, api: Api) -> web.StreamResponse:
        """Serve a request; the decider answers one that is not to be served here."""
        tenant = self._tenants.of_key(shown_key(request))
        is_full = self._num_inside >= self._deployment.gateway.requests_max
        if tenant is None or is_full or not self._facts.max_model_len:
            return await self._handing_on.hand_on(request)
        now = asyncio.get_running_loop().time()
        if now < self._refused_until.get(tenant.name, now):
            return await self._handing_on.hand_on(request)
        self._num_inside += 1
        try:
            found = await self._serve(request, api, tenant)
        finally:
            self._num_inside -= 1
        if found.status == 429 and found.headers.get(REASON_HEADER) in _USED_UP:
            self._refused_until[tenant.name] = now + int(found.headers[hdrs.RETRY_AFTER])
        return found

    async def _serve(self, request: web.Request, api: Api, tenant: Tenant) -> web.StreamResponse:
        record = RequestRecord(request_id(request), api.value, tenant.name)
        try:
            parse = partial(self._parse, api=api, tenant=tenant)
            client = as_deployed(await read(request, parse), self._defaults)
            made = await self._made(client, tenant)
        except PrfaasError as error:
            is_cut = isinstance(error, RequestError) and error.status in (400, 408)
            if is_cut and not request.content.is_eof():
                return error_response(error, {})
            return await self._handing_on.hand_on(request)
        if made is None:
            return await self._handing_on.hand_on(request)
        prompt, named_by = made
        request[SERVED_HERE] = True
        quality = tenant.quality_of(client.service)
        record.parsed(client.stream, client.num_sequences, "", quality, client.ignored)
        number, stream = next(self._numbers), ServedStream(request)
        exchange = Exchange(client, tenant, record, stream, RequestTrace({}), self._metrics)
        local = LocalRequest(number, exchange, stream, prompt, self._leg, self._channel.send)
        self._requests[number] = local
        self._idle.clear()
        try:
            return await local.run(request.headers, named_by)
        except OverflowError:
            return await self._handing_on.hand_on(request)
        finally:
            del self._requests[number]
            if not self._requests:
                self._idle.set()

    def _parse(self, body: bytes, api: Api, tenant: Tenant) -> ClientRequest:
        return parse_request(
            body,
            api,
            self._model,
            self._prompts.vocab_size,
            chat_endpoint=self._defaults.needs_chat_endpoint,
            rules=tenant.rules,
            adapters=self._facts.adapters,
        )

    async def _made(
        self, client: ClientRequest, tenant: Tenant
    ) -> tuple[EncodedPrompt, str] | None:
        """The prompt, and what its hashes depend on; None if an engine has to render it."""
        facts = self._facts
        if client.api is Api.CHAT and client.is_exact and not facts.is_own:
            return None
        layout = None if client.is_for_adapter else facts.layout
        prompt = await self._prompts.prompt(
            client, tenant, layout, facts.max_model_len, is_charged=False
        )
        named = layout if len(client.prompts) <= 1 else None
        return prompt, Naming(prompt.cache_salt, named, tenant.name).key


def main() -> None:
    """Serve as a worker."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # A terminal and a service manager send these to all processes; the decider ends its own.
        signal.signal(each, signal.SIG_IGN)
    # Only the process that started this one writes here.
    start: Start = pickle.loads(sys.stdin.buffer.read())  # noqa: S301
    set_up_logging(start.log_form, start.log_level)
    raise_descriptor_limit()
    try:
        asyncio.run(_run(start))
    except ConfigError as error:
        logging.getLogger(__name__).error("%s", error)
        sys.exit(1)


async def _run(start: Start) -> None:
    worker = Worker(start)
    # As in `run_gateway`.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(start.channel)) as channel:
        decider, listening, *_ = socket.recv_fds(channel, PATH_BYTES, LISTENING_MAX)
    if listening:  # Otherwise the decider has not come so far.
        await worker.run(Path(decider.rstrip(b"\0").decode()), listening)


if __name__ == "__main__":
    main()
