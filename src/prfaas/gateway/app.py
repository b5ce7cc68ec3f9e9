"""The HTTP edge: requests in, start and stop."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from prfaas.config.deployment import Deployment
from prfaas.core.places import Places
from prfaas.core.prefix_index import PrefixIndex
from prfaas.errors import ConfigError, PrfaasError, RequestError
from prfaas.gateway.access import TENANT, Access
from prfaas.gateway.answering import ClientGoneError, ClientStream
from prfaas.gateway.console.routes import Console
from prfaas.gateway.console.state import Parts
from prfaas.gateway.control import Control
from prfaas.gateway.control_api import ControlApi
from prfaas.gateway.deciding import Planner
from prfaas.gateway.decode import DecodeLeg
from prfaas.gateway.door import Door, add_limit_headers
from prfaas.gateway.driver import Driver
from prfaas.gateway.ending import Ending
from prfaas.gateway.endpoints import Endpoints
from prfaas.gateway.engine_events import EngineEvents, EventTiming
from prfaas.gateway.engines import Engines
from prfaas.gateway.exchange import Exchange, reply_headers
from prfaas.gateway.failures import error_body, error_response, openai_errors, status_of
from prfaas.gateway.flow import Flow
from prfaas.gateway.guards import Guards, told_of_link
from prfaas.gateway.journal import Journal
from prfaas.gateway.kv_lookup import KvLookup
from prfaas.gateway.loops import Loops
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.pools import Pools, PoolTiming
from prfaas.gateway.prefill import PrefillLeg
from prfaas.gateway.profiles import load_profiles
from prfaas.gateway.pulse import Pulse
from prfaas.gateway.records import NS_PER_MS, Outcome, Record, Records
from prfaas.gateway.rejections import RejectedError
from prfaas.gateway.requests import Api, parse_request
from prfaas.gateway.tenants import Tenant, Tenants, fairness
from prfaas.gateway.tickets import TicketOffice
from prfaas.gateway.tokenizing import PromptMaker
from prfaas.gateway.tracing import Trace, Tracing
from prfaas.gateway.transfers import Transfers, TransferView
from prfaas.gateway.views import Views
from prfaas.units import NS_PER_S
from prfaas.wire.identity import identity_in
from prfaas.wire.tickets import TicketSigner

SHUTDOWN_S = 5.0
"""How long requests in flight may go on when the gateway stops."""
LAST_WORDS_S = 5.0
"""How long a client may take to read the error that ends its stream."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
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
        stop: Ends the gateway once its requests are served, or `gateway.drain_timeout` is over.
        on_listening: Called with the base URL once requests are taken.

    Raises:
        ConfigError: The port is in use, or the tokenizer, an identity or the salt is missing.
    """
    gateway = Gateway(deployment, endpoints)
    try:
        on_listening(await gateway.start())
        await stop.wait()
        await gateway.drain()
    finally:
        await gateway.close()


class Gateway:
    """All parts of a gateway, put together.

    Args:
        deployment: What to serve.
        endpoints: Where its parts are.
        poll_s: Time between two looks at an engine.
        timing: Times of the pool subscriptions.
        events: Times of the subscriptions to engines' KV events.

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
        events: EventTiming | None = None,
    ) -> None:
        name, model = deployment.gateway.name, deployment.model.name
        identity = identity_in(deployment.security.identities, name)
        engine_tls, pool_tls = identity.client_context(), identity.client_context()
        engine_tls.check_hostname = True
        profiles = load_profiles(deployment)
        limits = deployment.routing
        tickets = TicketOffice(
            TicketSigner(identity), limits.prefill_timeout + limits.transfer_timeout
        )
        self._table = deployment.gateway
        self._model = model
        self._tracing = Tracing(deployment.tracing, name)
        self._prompts = PromptMaker(deployment.model.path)
        self.tenants = Tenants(deployment)
        self.index = PrefixIndex()
        self.metrics = Metrics()
        self.records = Records()
        self.driver = Driver(deployment, profiles, self.index)
        self.transfers = Transfers(self._transfer_over)
        self.journal = Journal(self.metrics.changed)
        self.guards = Guards(deployment, self.driver, self.journal)
        self.engines = Engines(deployment, endpoints, engine_tls, self.driver, self.guards, poll_s)
        self.pools = Pools(
            endpoints,
            name,
            pool_tls,
            self.index,
            self.transfers,
            self.driver,
            timing or PoolTiming(),
        )
        self.engine_events = EngineEvents(
            deployment, self.index, self.pools.layout, self.metrics.events.applied, events
        )
        self.metrics.events.watch(self.index, self.engine_events.names())
        self.metrics.watch(self.engines, self.pools, self.index, self.driver)
        self.metrics.watch_guards(self.guards)
        self.metrics.tenants.watch(self.tenants)
        self._access = Access(deployment.gateway, self.tenants, self.metrics.tenants.unauthorized)
        self._door = Door(Places(deployment.gateway.requests_max, fairness(deployment)))
        self._views = Views(model, self.engines, self.pools, self.metrics, self.records, self._door)
        self.loops = Loops(
            deployment, self.driver, self.pools, self.transfers, tickets, profiles, self.journal
        )
        self.pulse = Pulse(self.driver, self.guards, self.journal, self.loops.all)
        control = Control(
            deployment,
            self.driver,
            self.engines,
            self.pools,
            self.guards,
            self.pulse,
            self.journal,
        )
        self._control = ControlApi(control, self.journal, self.records)
        self._console = Console(
            Parts(
                deployment,
                self.engines,
                self.pools,
                self.index,
                self.metrics,
                self.records,
                control,
                self.journal,
            )
        )
        planner = Planner(self.engines, self.pools, self._prompts, self.driver, self.loops.copier)
        self._lookup = KvLookup(
            deployment,
            planner,
            self.tenants,
            self.index,
            self.driver,
            frozenset(self.engine_events.names()),
            self._prompts.vocab_size,
        )
        self._flow = Flow(
            planner=planner,
            driver=self.driver,
            guards=self.guards,
            prefill_leg=PrefillLeg(self.engines, model, deployment.routing, tickets),
            decode_leg=DecodeLeg(self.engines, deployment.routing.transfer_timeout // NS_PER_MS),
            ending=Ending(self._prompts, model),
            pools=self.pools,
            transfers=self.transfers,
            metrics=self.metrics,
        )
        self._runner: web.AppRunner | None = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Connect to everything and take requests.

        Returns:
            The base URL.

        Raises:
            ConfigError: The address can not be listened on.
        """
        self.engines.start()
        self.pools.start()
        self.engine_events.start()
        self._beating = asyncio.create_task(self.pulse.run())
        self._console.start()
        # A client that leaves cancels its handler, and with it both legs and the transfer.
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        host, _, port = self._table.listen.rpartition(":")
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except (OSError, OverflowError) as error:
            message = f"gateway.listen {self._table.listen!r} can not be used: {error}"
            raise ConfigError(message) from None
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def drain(self) -> None:
        """Answer new requests and `/health` with 503, and wait for those under way."""
        await self._door.close(self._table.drain_timeout / NS_PER_S)

    async def close(self) -> None:
        """Stop taking requests, let those in flight end, and disconnect."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self._console.close()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self.engine_events.close()
        await self.pools.close()
        await self.engines.close()
        self._prompts.close()
        await asyncio.to_thread(self._tracing.close)

    def _transfer_over(self, transfer: TransferView) -> None:
        self.metrics.arrived(transfer)
        self.driver.transfer_over(transfer.number)
        self.loops.transfer_over(transfer)
        self.guards.ended((transfer.source, transfer.destination), told_of_link(transfer))

    def _app(self) -> web.Application:
        app = web.Application(
            middlewares=[openai_errors, self._access.check],
            client_max_size=self._table.body_bytes_max,
        )
        app.on_response_prepare.append(add_limit_headers)
        app.on_response_prepare.append(self._door.add_headers)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        self._views.add_to(app.router)
        self._console.add_to(app.router)
        self._control.add_to(app.router)
        self._lookup.add_to(app.router)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.COMPLETIONS)

    async def _generate(self, request: web.Request, api: Api) -> web.StreamResponse:
        """Serve one request; whatever happens, it is recorded and counted once."""
        tenant = request[TENANT]
        record = Record(_request_id(request), api.value, tenant.name)
        stream = ClientStream(request)
        trace = self._tracing.begin(record, request.headers, self._model)
        self.records.add(record)
        self.metrics.began()
        try:
            async with asyncio.timeout(self._table.request_timeout / NS_PER_S):
                with self._door.enter(tenant):
                    return await self._answer(request, api, record, stream, trace)
        except (PrfaasError, TimeoutError, web.HTTPException) as error:
            return await _fail(error, record, stream)
        except (asyncio.CancelledError, ClientGoneError):
            record.outcome = Outcome.CANCELLED
            raise asyncio.CancelledError from None
        except Exception as error:
            _log.exception("request %s failed", record.request_id)
            return await _fail(error, record, stream)
        finally:
            self._end(record, tenant)
            trace.end(record, self._model)

    async def _answer(
        self, request: web.Request, api: Api, record: Record, stream: ClientStream, trace: Trace
    ) -> web.StreamResponse:
        try:
            data = await request.read()
        except web.RequestPayloadError:
            raise RequestError(
                "the request body can not be read as its Content-Encoding says"
            ) from None
        client = parse_request(data, api, self._model, self._prompts.vocab_size)
        record.stream = client.stream
        exchange = Exchange(client, request[TENANT], record, stream, trace.headers, self.metrics)
        return await self._flow.serve(exchange)

    def _end(self, record: Record, tenant: Tenant) -> None:
        tenant.quota.count_tokens(record.num_output_tokens, time.monotonic_ns())
        if record.e2e_ns is None:
            record.e2e_ns = record.age_ns()
        self.metrics.ended(record)
        self.loops.ended(record)
        _log.info(
            "request %s %s: path %s, %s prompt tokens, %s output tokens, %d ms",
            record.request_id,
            record.outcome.value,
            record.path,
            record.num_prompt_tokens,
            record.num_output_tokens,
            record.e2e_ns // NS_PER_MS,
        )


async def _fail(error: Exception, record: Record, stream: ClientStream) -> web.StreamResponse:
    """End a request with an error, within the stream if that has begun."""
    status = status_of(error)
    record.outcome = Outcome.REJECTED if status < 500 else Outcome.FAILED
    if isinstance(error, RejectedError):
        record.rejected = error.reason
    _log.info("request %s: %d %s", record.request_id, status, type(error).__name__)
    if not stream.has_begun:
        return error_response(error, reply_headers(record))
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            return await stream.fail(error_body(error))
    except (TimeoutError, ClientGoneError):
        # Closes the connection: the client is gone, or does not read what it is sent.
        raise asyncio.CancelledError from None


def _request_id(request: web.Request) -> str:
    wanted = request.headers.get("X-Request-Id", "")
    return wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
