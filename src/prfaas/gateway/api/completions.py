"""The two endpoints that generate: a request in, an answer or an error out, recorded once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http.client import responses

from aiohttp import web

from prfaas.config.deployment import Deployment
from prfaas.core.request.events import Outcome
from prfaas.errors import PrfaasError
from prfaas.gateway.admission.charging import Charging
from prfaas.gateway.api.auth import TENANT, AdmittedRequest, RequestAdmission
from prfaas.gateway.http.errors import (
    RejectedError,
    TimedOutError,
    error_body,
    error_response,
    status_of,
)
from prfaas.gateway.http.request_body import read, request_id, time_limit
from prfaas.gateway.http.responses import ClientGoneError, ClientStream
from prfaas.gateway.openai.requests import Api, ClientRequest, parse_request
from prfaas.gateway.serving.request_run import RequestRun, RequestServices
from prfaas.gateway.serving.request_state import Exchange, reply_headers
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.request_records import (
    RequestRecord,
    ended,
    log_fields,
    trouble,
)
from prfaas.gateway.telemetry.tracing import RequestTrace, Tracing
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.gateway.tokenization.prompt_encoder import PromptMaker
from prfaas.logs import log_event
from prfaas.units import NS_PER_S

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to generate, as it came."""

    tenant: Tenant
    headers: Mapping[str, str]
    """The client's."""
    read: Callable[[], Awaitable[ClientRequest]]
    """Returns its body, checked; RequestError if it is none."""


class DeployedDefaults:
    """Settings of all requests, of which the arguments of each engine are asked: once."""

    def __init__(self, deployment: Deployment) -> None:
        self.response_role, self.forces_usage = deployment.response_role, deployment.forces_usage
        self.needs_chat_endpoint = deployment.needs_chat_endpoint


def as_deployed(client: ClientRequest, defaults: DeployedDefaults) -> ClientRequest:
    """Return a request with what its deployment sets for all."""
    if client.answer_role != defaults.response_role:
        client = replace(client, answer_role=defaults.response_role)
    if client.stream and defaults.forces_usage:
        client = replace(client, include_usage=True)
    return client


class CompletionService:
    """Serves chat and completions.

    Args:
        error_s: Time limit for a client to read the error that ends its stream, seconds.
    """

    def __init__(
        self,
        live: LiveParts,
        parts: RequestServices,
        prompts: PromptMaker,
        request_admission: RequestAdmission,
        tracing: Tracing,
        charging: Charging,
        error_s: float,
    ) -> None:
        self._live, self._parts, self._prompts = live, parts, prompts
        self._request_admission, self._tracing = request_admission, tracing
        self._charging, self._error_s = charging, error_s
        self._model, self._defaults = live.deployment.model.name, DeployedDefaults(live.deployment)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_post("/v1/chat/completions", partial(self._generate, api=Api.CHAT))
        router.add_post("/v1/completions", partial(self._generate, api=Api.COMPLETIONS))

    async def _generate(self, request: web.Request, api: Api) -> web.StreamResponse:
        tenant = request[TENANT]
        record = RequestRecord(request_id(request), api.value, tenant.name)
        asked = Asked(tenant, request.headers, partial(self._read, request, api))
        return await self.serve(asked, record, ClientStream(request))

    async def serve(
        self, asked: Asked, record: RequestRecord, stream: ClientStream
    ) -> web.StreamResponse:
        """Serve one request; whatever happens, it is recorded and counted once."""
        trace = self._tracing.begin(record, asked.headers, self._model)
        self._live.records.add(record)
        self._parts.metrics.began()
        try:
            return await self._in_time(asked, record, stream, trace)
        except (PrfaasError, web.HTTPException) as error:
            return await self._fail(error, record, stream)
        except (asyncio.CancelledError, ClientGoneError):
            record.ended(Outcome.CANCELLED)
            raise asyncio.CancelledError from None
        except Exception as error:
            _log.exception("request_failed request_id=%s", record.request_id)
            return await self._fail(error, record, stream)
        finally:
            self._end(record, asked.tenant)
            trace.end(record, self._model)

    async def _in_time(
        self,
        asked: Asked,
        record: RequestRecord,
        stream: ClientStream,
        trace: RequestTrace,
    ) -> web.StreamResponse:
        limit = time_limit(asked.headers, self._live.deployment.gateway.request_timeout)
        record.limit(round(limit.seconds * NS_PER_S))
        try:
            async with asyncio.timeout(limit.seconds):
                with self._request_admission.enter(asked.tenant) as entry:
                    return await self._answer(asked, record, stream, trace, entry)
        except TimeoutError:
            message = f"the request took longer than {limit.source} allows: {limit.seconds:g} s"
            raise TimedOutError(message) from None

    async def _answer(
        self,
        asked: Asked,
        record: RequestRecord,
        stream: ClientStream,
        trace: RequestTrace,
        entry: AdmittedRequest,
    ) -> web.StreamResponse:
        client, tenant, parts = await asked.read(), asked.tenant, self._parts
        service = "" if client.service is None else client.service.name
        quality = tenant.quality_of(client.service)
        record.parsed(client.stream, client.num_sequences, service, quality, client.ignored)
        entry.widen(client.num_sequences)
        exchange = Exchange(client, tenant, record, stream, trace, parts.metrics)
        wanted = client.num_sequences, client.num_tokens_expected, client.priority
        async with parts.holding.slots(tenant.name, *wanted) as turn:
            parts.fleet.retries.deposit(time.monotonic_ns())
            try:
                plan = await parts.planner.plan(client, tenant, exchange.record)
            finally:
                parts.metrics.decided(exchange.record)
            client.forget_messages()
            turn.planned(plan.route.number, plan.routed, streams=client.stream)
            return await RequestRun(parts, exchange, plan, turn).answer()

    async def _read(self, request: web.Request, api: Api) -> ClientRequest:
        parse = partial(
            parse_request,
            api=api,
            model=self._model,
            vocab_size=self._prompts.vocab_size,
            chat_endpoint=self._defaults.needs_chat_endpoint,
            rules=request[TENANT].rules,
            adapters=self._live.engines.adapters(),
        )
        return as_deployed(await read(request, parse), self._defaults)

    async def _fail(
        self, error: Exception, record: RequestRecord, stream: ClientStream
    ) -> web.StreamResponse:
        """End a request with an error, within the stream if that has begun."""
        status = status_of(error)
        rejected = error.reason if isinstance(error, RejectedError) else None
        said = f"{status} {responses.get(status, '')}".rstrip()
        record.failed(_outcome(error, status), said, rejected)
        if rejected or status >= 500:
            what = "refused" if status in (429, 503) else "failed"
            self._parts.facts.report(trouble(record, what, rejected or said))
        log_event(
            _log,
            logging.INFO,
            "request_refused" if status < 500 else "request_broken",
            request_id=record.request_id,
            status=status,
            error=type(error).__name__,
        )
        if not stream.is_open:
            return error_response(error, reply_headers(record))
        try:
            async with asyncio.timeout(self._error_s):
                return await stream.fail(error_body(error))
        except (TimeoutError, ClientGoneError):
            # Closes the connection: the client is gone, or does not read what it is sent.
            raise asyncio.CancelledError from None

    def _end(self, record: RequestRecord, tenant: Tenant) -> None:
        self._charging.settle(tenant, record)
        record.close()
        self._parts.metrics.ended(record)
        self._parts.facts.report(ended(record))
        log_event(_log, logging.INFO, "request_ended", **log_fields(record))


def _outcome(error: Exception, status: int) -> Outcome:
    if isinstance(error, TimedOutError):
        return Outcome.TIMED_OUT
    return Outcome.REJECTED if status < 500 else Outcome.FAILED
