"""The HTTP edge: routes, errors, start and stop."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from prfaas.config.deployment import ClusterRole, Deployment
from prfaas.core.prefix_index import PrefixIndex
from prfaas.core.routing import ThresholdPolicy
from prfaas.errors import ConfigError, EngineError, PrfaasError, RequestError
from prfaas.gateway import metrics as metrics_module
from prfaas.gateway.answering import ClientGoneError, ClientStream, error_object, json_response
from prfaas.gateway.deciding import Planner, UnavailableError
from prfaas.gateway.endpoints import Endpoints
from prfaas.gateway.engines import Engines
from prfaas.gateway.flow import NS_PER_MS, Exchange, Flow, reply_headers
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.pools import Pools, PoolTiming
from prfaas.gateway.prefill import PrefillLeg
from prfaas.gateway.records import RECORDS_MAX, Outcome, Record, Records
from prfaas.gateway.requests import Api, parse_request
from prfaas.gateway.salt import tenant_salt
from prfaas.gateway.tokenizing import PromptMaker
from prfaas.gateway.transfers import Transfers
from prfaas.units import NS_PER_S
from prfaas.wire.identity import identity_in

REQUESTS_MAX = 4096
"""Requests in flight; more are refused with 429 before their bodies are read."""
SHUTDOWN_S = 5.0
"""How long requests in flight may go on when the gateway stops."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_RETRY_LATER = {"Retry-After": "1"}
_log = logging.getLogger(__name__)


async def serve(
    deployment: Deployment,
    endpoints: Endpoints,
    stop: asyncio.Event,
    on_listening: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a gateway until `stop` is set.

    Args:
        deployment: What to serve.
        endpoints: Where its parts are.
        stop: Ends the gateway; requests in flight get a few seconds.
        on_listening: Called with the base URL once requests are taken.

    Raises:
        ConfigError: The port is in use, or the tokenizer, an identity or the salt is missing.
    """
    gateway = Gateway(deployment, endpoints)
    try:
        on_listening(await gateway.start())
        await stop.wait()
    finally:
        await gateway.close()


class Gateway:
    """All parts of a gateway, put together.

    Args:
        deployment: What to serve.
        endpoints: Where its parts are.
        poll_s: Time between two looks at an engine.
        timing: Times of the pool subscriptions.

    Raises:
        ConfigError: The tokenizer, an identity or the salt is missing.
    """

    def __init__(
        self,
        deployment: Deployment,
        endpoints: Endpoints,
        *,
        poll_s: float = 1.0,
        timing: PoolTiming | None = None,
    ) -> None:
        self._deployment = deployment
        identity = identity_in(deployment.security.identities, deployment.gateway.name)
        engine_tls = identity.client_context()
        engine_tls.check_hostname = True
        salt = tenant_salt(deployment.state)
        policy = ThresholdPolicy(deployment.routing.offload_threshold)
        self.index = PrefixIndex()
        self.metrics = Metrics()
        self.records = Records()
        self.transfers = Transfers(self.metrics.arrived)
        self.engines = Engines(deployment, endpoints, engine_tls, poll_s)
        self.pools = Pools(
            endpoints,
            deployment.gateway.name,
            identity.client_context(),
            self.index,
            self.transfers,
            timing or PoolTiming(),
        )
        self.metrics.watch(self.engines, self.pools, self.index, policy.offload_threshold)
        self._prompts = PromptMaker(deployment.model.path, salt)
        self._flow = Flow(
            planner=Planner(self.engines, self.pools, self.index, self._prompts, policy),
            engines=self.engines,
            prefill_leg=PrefillLeg(self.engines, deployment.model.name, salt, deployment.routing),
            pools=self.pools,
            transfers=self.transfers,
            metrics=self.metrics,
            cache_salt=salt,
            transfer_timeout_ms=deployment.routing.transfer_timeout // NS_PER_MS,
        )
        self._timeout_s = deployment.gateway.request_timeout / NS_PER_S
        self._num_in_flight = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Connect to everything and take requests.

        Returns:
            The base URL.

        Raises:
            ConfigError: The address can not be listened on.
        """
        self.engines.start()
        self.pools.start()
        # A client that leaves cancels its handler, and with it both legs and the transfer.
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        listen = self._deployment.gateway.listen
        host, _, port = listen.rpartition(":")
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"gateway.listen {listen!r} can not be used: {reason}") from None
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop taking requests, let those in flight end, and disconnect."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self.pools.close()
        await self.engines.close()
        self._prompts.close()

    def _app(self) -> web.Application:
        app = web.Application(
            middlewares=[_openai_errors],
            client_max_size=self._deployment.gateway.body_bytes_max,
        )
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/control/requests", self._requests)
        app.router.add_get("/control/requests/{request_id}", self._request)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.COMPLETIONS)

    async def _generate(self, request: web.Request, api: Api) -> web.StreamResponse:
        """Serve one request; whatever happens, it is recorded and counted once."""
        record = Record(_request_id(request), api.value)
        stream = ClientStream(request)
        self.records.add(record)
        self.metrics.began()
        self._num_in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._answer(request, api, record, stream)
        except (PrfaasError, TimeoutError, web.HTTPException) as error:
            return await self._fail(error, record, stream)
        except (asyncio.CancelledError, ClientGoneError):
            record.outcome = Outcome.CANCELLED
            raise asyncio.CancelledError from None
        except Exception as error:
            _log.exception("request %s failed", record.request_id)
            return await self._fail(error, record, stream)
        finally:
            self._num_in_flight -= 1
            self._end(record)

    async def _answer(
        self, request: web.Request, api: Api, record: Record, stream: ClientStream
    ) -> web.StreamResponse:
        if self._num_in_flight > REQUESTS_MAX:
            raise RequestError(
                f"{REQUESTS_MAX} requests are in flight, which is the limit; try again",
                status=429,
                error_type="TooManyRequestsError",
            )
        model, vocab_size = self._deployment.model.name, self._prompts.vocab_size
        client = parse_request(await request.read(), api, model, vocab_size)
        record.stream = client.stream
        trace = request.headers.get("traceparent", "")
        headers = {"traceparent": trace} if _TRACEPARENT.fullmatch(trace) else {}
        return await self._flow.serve(Exchange(client, record, stream, headers))

    async def _fail(
        self, error: Exception, record: Record, stream: ClientStream
    ) -> web.StreamResponse:
        status, error_type, param = _status(error)
        record.outcome = Outcome.REJECTED if status < 500 else Outcome.FAILED
        message = _message(error, status)
        _log.info("request %s: %s %s", record.request_id, status, error_type)
        body = error_object(message, error_type, param, status)
        if stream.has_begun:
            return await stream.fail(body)
        headers = reply_headers(record) | (_RETRY_LATER if status in (429, 503) else {})
        return json_response(body, status, headers)

    def _end(self, record: Record) -> None:
        if record.e2e_ns is None:
            record.e2e_ns = record.age_ns()
        self.metrics.ended(record)
        _log.info(
            "request %s %s: path %s, %s prompt tokens, %s output tokens, %d ms",
            record.request_id,
            record.outcome.value,
            record.path,
            record.num_prompt_tokens,
            record.num_output_tokens,
            record.e2e_ns // NS_PER_MS,
        )

    async def _models(self, request: web.Request) -> web.Response:
        ready = self.engines.choose(ClusterRole.PD)
        model = {
            "id": self._deployment.model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "prfaas",
            "root": self._deployment.model.name,
            "parent": None,
            "max_model_len": ready.max_model_len if ready else None,
        }
        return json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        if self.engines.choose(ClusterRole.PD) is None:
            message = "no engine of a PD cluster is ready"
            body = error_object(message, "ServiceUnavailableError", None, 503)
            return json_response(body, 503, _RETRY_LATER)
        return json_response({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": metrics_module.CONTENT_TYPE}
        return web.Response(body=self.metrics.text(), headers=headers)

    async def _requests(self, request: web.Request) -> web.Response:
        limit = request.query.get("limit", "100")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= RECORDS_MAX:
            raise RequestError(
                f"limit must be between 1 and {RECORDS_MAX}, got {limit[:20]!r}", param="limit"
            )
        records = [record.as_json() for record in self.records.latest(int(limit))]
        return json_response({"requests": records})

    async def _request(self, request: web.Request) -> web.Response:
        record = self.records.find(request.match_info["request_id"])
        if record is None:
            raise RequestError(
                f"no such request among the last {RECORDS_MAX}",
                status=404,
                error_type="NotFoundError",
            )
        return json_response(record.as_json())


@web.middleware
async def _openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error has OpenAI's shape, those of the router included."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        status, error_type, param = _status(error)
        message = f"{error.reason}: {request.method} {request.path[:200]}"
        return json_response(error_object(message, error_type, param, status), status, headers)
    except RequestError as error:
        status, error_type, param = _status(error)
        return json_response(error_object(str(error), error_type, param, status), status)


def _status(error: Exception) -> tuple[int, str, str | None]:
    """HTTP status, OpenAI error type and parameter of an error."""
    match error:
        case RequestError():
            return error.status, error.error_type, error.param
        case web.HTTPException():
            return error.status, type(error).__name__.removeprefix("HTTP") + "Error", None
        case UnavailableError():
            return 503, "ServiceUnavailableError", None
        case TimeoutError():
            return 504, "GatewayTimeoutError", None
        case EngineError():
            return 502, "BadGatewayError", None
        case _:
            return 500, "InternalServerError", None


def _message(error: Exception, status: int) -> str:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return error.text or error.reason
        case web.HTTPException():
            return error.reason
        case PrfaasError():
            return str(error)
        case TimeoutError():
            return "the request took longer than gateway.request_timeout allows"
        case _:
            return "the gateway failed; its log says why"


def _request_id(request: web.Request) -> str:
    wanted = request.headers.get("X-Request-Id", "")
    return wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
