"""The HTTPS port of one engine: what a gateway of a site may ask, and what it learns."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import aiohttp
import msgspec
from aiohttp import web

from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.sharing.engine_queue import Why
from prfaas.errors import PeerError, RequestError
from prfaas.membership.agreements import Agreements
from prfaas.proxy.bodies import Prefill, computed_in, read_prefill
from prfaas.proxy.metrics import ProxyMetrics
from prfaas.proxy.turns import Turn, TurnRefusedError, Turns
from prfaas.wire.identity import peer_name
from prfaas.wire.plain_http import name_server
from prfaas.wire.site_authorities import peer_certificate

BODY_BYTES_MAX = 32 << 20
HELD_BYTES_MAX = 256 << 20
"""Bodies of one site that wait, together; more are refused."""
BODY_S, PAGE_S = 60.0, 5.0
ANSWER_BYTES_MAX = 32 << 20
PASSED_HEADERS = ("traceparent", "X-Request-Id")
PAGES = ("/health", "/v1/models")
"""Pages of the engine that gateways read as they are."""
RETRY_AFTER_S = "1"
_STATUS = {Why.NO_CONTRACT: 403, Why.QUEUE_FULL: 429}


class EnginePort:
    """Answers the gateways of all sites for one engine.

    Args:
        engine: Its name.
        url: Where it is.
        agreements: Contracts in force.
        turns: Decides whose prompt is next.
        metrics: Count.
        http: To the engine.
        on_used: Called with a site, its tokens and the time at the engine, ns.
    """

    def __init__(
        self,
        engine: str,
        url: str,
        agreements: Agreements,
        turns: Turns,
        metrics: ProxyMetrics,
        http: aiohttp.ClientSession,
        on_used: Callable[[str, int, int], None],
    ) -> None:
        self._engine, self._url = engine, url
        self._agreements, self._turns, self._metrics = agreements, turns, metrics
        self._http, self._on_used = http, on_used
        self._held_bytes: dict[str, int] = {}

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
        try:
            async with (
                asyncio.timeout(PAGE_S),
                self._http.get(self._url + request.path, allow_redirects=False) as reply,
            ):
                body = await _read(reply)
                return web.Response(status=reply.status, body=body, content_type=reply.content_type)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return _error(503, f"engine {self._engine} does not answer")

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
        return _error(404, "a shared engine prefills prompts, and does nothing else for sites")

    # --- prefills ---

    async def _prefill(self, request: web.Request) -> web.Response:
        if isinstance(site := self._site(request), web.Response):
            return site
        num_bytes = request.content_length
        if num_bytes is None:
            return _error(411, "the request has no Content-Length")
        held = self._held_bytes.get(site, 0)
        if num_bytes > BODY_BYTES_MAX or held + num_bytes > HELD_BYTES_MAX:
            self._metrics.refused.labels(reason="memory").inc()
            return _error(429, "too many bytes of this site wait already")
        self._held_bytes[site] = held + num_bytes
        outcome = "left"
        try:
            answer = await self._take(request, site)
            outcome = _outcome(answer.status)
            return answer
        finally:
            self._metrics.requests.labels(site=site, outcome=outcome).inc()
            self._held_bytes[site] -= num_bytes

    async def _take(self, request: web.Request, site: str) -> web.Response:
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
            prefill = read_prefill(body)
        except RequestError as error:
            return _error(400, str(error))
        except (TimeoutError, web.HTTPRequestEntityTooLarge):
            return _error(408, "the body did not come in time, or is too large")
        if not self._agreements.claim(tenant_tag(prefill.cache_salt), site):
            self._metrics.refused.labels(reason="salt").inc()
            return _error(403, "the cache salt is of another site, or one too many")
        num_tokens = len(prefill.prompt)
        headers = {name: value for name in PASSED_HEADERS if (value := request.headers.get(name))}
        try:
            async with self._turns.turn(
                site, self._engine, num_tokens, can_wait=prefill.can_wait
            ) as turn:
                return await self._forward(site, prefill, headers, turn)
        except TurnRefusedError as error:
            self._metrics.refused.labels(reason=error.why.value).inc()
            return _error(_STATUS[error.why], f"refused: {error.why.value}")

    async def _forward(
        self, site: str, prefill: Prefill, headers: dict[str, str], turn: Turn
    ) -> web.Response:
        num_tokens = len(prefill.prompt)
        metrics = self._metrics
        metrics.waited.labels(site=site).observe(turn.waited_ns / 1e9)
        metrics.tokens.labels(site=site, kind="asked").inc(num_tokens)
        computed = num_tokens
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with self._http.post(
                f"{self._url}/v1/completions",
                data=msgspec.json.encode(prefill),
                headers={"Content-Type": "application/json", **headers},
                allow_redirects=False,
            ) as reply:
                body = await _read(reply)
            computed = computed_in(body, num_tokens) if reply.status == 200 else 0
            if reply.status == 200:
                turn.computed = computed
            return web.Response(status=reply.status, body=body, content_type="application/json")
        except (aiohttp.ClientError, OSError) as error:
            computed = 0
            if isinstance(error, aiohttp.ClientConnectorError):
                turn.computed = 0  # It never had the prompt: the share is not charged either.
            return _error(502, f"engine {self._engine} does not answer")
        finally:
            metrics.tokens.labels(site=site, kind="computed").inc(computed)
            held_s = loop.time() - began
            metrics.held_seconds.labels(site=site).inc(held_s)
            self._on_used(site, computed, round(held_s * 1e9))

    def _site(self, request: web.Request) -> str | web.Response:
        """Site of the gateway that asks, by its certificate; the answer for all others."""
        transport = request.transport
        secured: ssl.SSLObject | None = (
            transport.get_extra_info("ssl_object") if transport is not None else None
        )
        contracts = self._agreements.contracts
        try:
            name = peer_name(secured, contracts.site_of_gateway.keys())
            site = self._agreements.authorities.site_of(name, peer_certificate(secured))
        except PeerError:
            site = None
        if site is not None:
            return site
        self._metrics.refused.labels(reason="unknown").inc()
        answer = _error(403, "no contract has a gateway with this certificate")
        answer.force_close()
        return answer


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError("the answer is too long")
    return bytes(body)


def _outcome(status: int) -> str:
    if status == 200:
        return "ok"
    if status in (403, 429):
        return "refused"
    return "failed" if status >= 500 else "invalid"


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": RETRY_AFTER_S} if status == 429 else None
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)
