"""The HTTPS port of one engine: what a gateway of a site may ask, and what it learns."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import hdrs, web

from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.sharing.engine_queue import QueueRefusal
from prfaas.errors import EngineError, RequestError
from prfaas.gateway.http.responses import read_answer
from prfaas.proxy.bodies import Prefill, computed_in, read_prefill
from prfaas.proxy.connections import ConnectionCounts, GatewayConnection, refused
from prfaas.proxy.metrics import ProxyMetrics
from prfaas.proxy.turns import BODY_BYTES_MAX, EngineTurn, TurnRefusedError, Turns
from prfaas.wire.plain_http import name_server

BODY_S, PAGE_S = 60.0, 5.0
PASSED_HEADERS = ("traceparent", "X-Request-Id")
PAGES = ("/health", "/v1/models")
"""Pages of the engine that gateways read as they are."""
PAGE_KEPT_S = 1.0
"""The engine is asked for a page once in that time, for all sites."""
_STATUS = {
    QueueRefusal.NO_CONTRACT: 403,
    QueueRefusal.QUEUE_FULL: 429,
    QueueRefusal.MEMORY: 429,
    QueueRefusal.REFUSALS: 429,
}


class _Page(NamedTuple):
    """An answer of the engine."""

    status: int
    body: bytes
    kind: str


class ProxyEnginePort:
    """Answers the gateways of all sites for one engine.

    Args:
        turns: Decides whose prompt is read, and whose is next.
        connections: Know the site at the other end.
    """

    def __init__(
        self,
        engine: str,
        url: str,
        turns: Turns,
        connections: ConnectionCounts,
        metrics: ProxyMetrics,
        http: aiohttp.ClientSession,
    ) -> None:
        self._engine, self._url, self._http = engine, url, http
        self._turns, self._connections, self._metrics = turns, connections, metrics
        self._pages: dict[str, tuple[float, asyncio.Task[_Page | None]]] = {}
        """Time when the engine was asked for a page, seconds, and its answer."""

    def app(self) -> web.Application:
        """The application that serves the port."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.on_response_prepare.append(name_server)
        app.router.add_post("/v1/completions", self._prefill)
        app.router.add_get("/metrics", self._load)
        for path in PAGES:
            app.router.add_get(path, self._page)
        app.router.add_route("*", "/{path:.*}", self._other)
        return app

    # --- pages ---

    async def _page(self, request: web.Request) -> web.Response:
        if isinstance(site := self._site(request), web.Response):
            return site
        now = asyncio.get_running_loop().time()
        asked_at, page = self._pages.get(request.path, (0.0, None))
        if page is None or now - asked_at >= PAGE_KEPT_S:
            page = asyncio.create_task(self._ask_page(request.path))
            self._pages[request.path] = now, page
        # Its gateway may leave; others wait for the same page.
        if (found := await asyncio.shield(page)) is None:
            return refused(503, f"engine {self._engine} does not answer")
        return web.Response(status=found.status, body=found.body, content_type=found.kind)

    async def _ask_page(self, path: str) -> _Page | None:
        """A page of the engine; None if it does not answer."""
        try:
            async with (
                asyncio.timeout(PAGE_S),
                self._http.get(self._url + path, allow_redirects=False) as reply,
            ):
                return _Page(reply.status, await read_answer(reply), reply.content_type)
        except (EngineError, aiohttp.ClientError, OSError):
            return None

    async def _load(self, request: web.Request) -> web.Response:
        """The load that the site itself causes here, under vLLM's names."""
        if isinstance(site := self._site(request), web.Response):
            return site
        queue = self._turns.queue
        waiting = queue.waiting_of(site, self._engine)
        running = queue.running_of(site, self._engine)
        text = f"vllm:num_requests_waiting {waiting}.0\nvllm:num_requests_running {running}.0\n"
        return web.Response(text=text)

    async def _other(self, request: web.Request) -> web.Response:
        if isinstance(site := self._site(request), web.Response):
            return site
        self._metrics.refused.labels(reason="path").inc()
        return refused(404, "a shared engine prefills prompts, and does nothing else for sites")

    # --- prefills ---

    async def _prefill(self, request: web.Request) -> web.Response:
        if isinstance(site := self._site(request), web.Response):
            return site
        num_bytes = request.content_length
        if num_bytes is None:
            return refused(411, "the request has no Content-Length")
        if hdrs.CONTENT_ENCODING in request.headers:
            # What it becomes is not known before it is read.
            return refused(415, "a prefill is not compressed")
        outcome = "left"
        try:
            with self._turns.hold(site, num_bytes):
                answer = await self._take(request, site)
            outcome = _outcome(answer.status)
            return answer
        except TurnRefusedError as error:
            outcome = "refused"
            self._metrics.refused.labels(reason=error.why.value).inc()
            return refused(_STATUS[error.why], f"refused: {error.why.value}")
        finally:
            self._metrics.requests.labels(site=site, outcome=outcome).inc()

    async def _take(self, request: web.Request, site: str) -> web.Response:
        try:
            with self._turns.read(site, self._engine):
                async with asyncio.timeout(BODY_S):
                    body = await request.read()
            prefill = read_prefill(body)
        except RequestError as error:
            self._turns.refused(site, len(body))
            return refused(400, str(error))
        except (TimeoutError, web.HTTPRequestEntityTooLarge):
            return refused(408, "the body did not come in time, or is too large")
        if not self._connections.agreements.claim(tenant_tag(prefill.cache_salt), site):
            self._turns.refused(site, len(body))
            self._metrics.refused.labels(reason="salt").inc()
            return refused(403, "the cache salt is of another site, or one too many")
        num_tokens = prefill.num_tokens
        headers = {name: value for name in PASSED_HEADERS if (value := request.headers.get(name))}
        async with self._turns.turn(
            site, self._engine, num_tokens, can_wait=prefill.can_wait
        ) as turn:
            try:
                await prefill.check_tokens()
            except RequestError as error:
                return refused(400, str(error))
            return await self._forward(site, prefill, num_tokens, headers, turn)

    async def _forward(
        self,
        site: str,
        prefill: Prefill,
        num_tokens: int,
        headers: dict[str, str],
        turn: EngineTurn,
    ) -> web.Response:
        self._metrics.asked(site, num_tokens, turn.waited_ns)
        computed, began_ns = num_tokens, time.monotonic_ns()
        try:
            async with self._http.post(
                f"{self._url}/v1/completions",
                data=msgspec.json.encode(prefill),
                headers={"Content-Type": "application/json", **headers},
                allow_redirects=False,
            ) as reply:
                body = await read_answer(reply)
            computed = computed_in(body, num_tokens) if reply.status == 200 else 0
            if reply.status == 200:
                turn.computed = computed
            return web.Response(status=reply.status, body=body, content_type="application/json")
        except (EngineError, aiohttp.ClientError, OSError) as error:
            computed = 0
            if isinstance(error, aiohttp.ClientConnectorError):
                turn.computed = 0  # It never had the prompt: the share is not charged either.
            return refused(502, f"engine {self._engine} does not answer")
        finally:
            self._metrics.used(site, computed, time.monotonic_ns() - began_ns)

    def _site(self, request: web.Request) -> str | web.Response:
        """Site of the gateway that asks, by its certificate; the answer for all others, and for
        connections beyond the limit of their site."""
        if isinstance(connection := request.protocol, GatewayConnection):
            connection.lift()  # A request has limits of its own.
            if connection.is_refused:
                return refused(429, "this site has too many connections", is_last=True)
        if (site := self._connections.site_of(request.transport)) is not None:
            return site
        self._metrics.refused.labels(reason="unknown").inc()
        return refused(403, "no contract has a gateway with this certificate", is_last=True)


def _outcome(status: int) -> str:
    if status == 200:
        return "ok"
    if status in (403, 429):
        return "refused"
    return "failed" if status >= 500 else "invalid"
