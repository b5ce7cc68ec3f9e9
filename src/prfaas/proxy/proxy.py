"""The proxy of a PrfaaS site: one HTTPS port for each shared engine, and one for its operators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import generate_latest

from prfaas.audit.settings import AuditSettings
from prfaas.audit.writer import AuditLog
from prfaas.config.addresses import split_address
from prfaas.config.governance.contracts import SharedEngineTable, load_contracts
from prfaas.core.billing.usage import usage_record
from prfaas.errors import ConfigError
from prfaas.membership.agreements import Agreements
from prfaas.proxy.connections import TLS_LIMITS, ConnectionCounts, GatewayConnection
from prfaas.proxy.engine_port import ProxyEnginePort
from prfaas.proxy.metrics import ProxyMetrics
from prfaas.proxy.turns import Turns
from prfaas.series import CONTENT_TYPE
from prfaas.wire.identity import Identity
from prfaas.wire.plain_http import EngineResponse, PlainHandler, listen, name_server
from prfaas.wire.sockets import raise_descriptor_limit, request_socket

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks at the contracts file."""
RECORD_LOOKS = 5
PREFILL_S = 600.0
"""Longest time of a prompt at an engine."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Settings of a proxy."""

    name: str
    contracts: Path
    identity: Identity
    """Certificate, key, authority of this site."""
    admin: tuple[str, int]
    """Host and port of `/health` and `/metrics`, plain HTTP."""
    audit: AuditSettings | None = None
    """Log of usage, for the bill; None without."""
    look_s: float = LOOK_S
    """Time between two looks at the contracts file, seconds."""


class Proxy:
    """Serves the engines of a contracts file; ConfigError if the contracts file or the identity
    cannot be used."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self.metrics = ProxyMetrics()
        self._agreements = Agreements(settings.contracts)
        self._engines = load_contracts(settings.contracts).engines
        if not self._engines:
            raise ConfigError(f"{settings.contracts} has no [engines.ENGINE]: nothing to serve")
        self._turns = Turns({name: table.slots for name, table in self._engines.items()})
        self.connections = ConnectionCounts(self._agreements, self.metrics)
        self._context = settings.identity.server_context()
        self._agreements.authorities.trust(self._context)
        self._audit = (
            AuditLog(settings.audit, settings.name, self.metrics.audit)
            if settings.audit is not None
            else None
        )
        self._runners: list[web.AppRunner] = []
        self._listeners: list[asyncio.Server] = []
        self.ports: dict[str, int] = {}
        """Port of each engine, and of `admin`, once they are open."""

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until cancelled; ConfigError if a port is taken."""
        timeout = aiohttp.ClientTimeout(total=PREFILL_S, sock_connect=2.0)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=3.0, socket_factory=request_socket
        )
        async with aiohttp.ClientSession(
            connector=connector,
            response_class=EngineResponse,
            timeout=timeout,
            trust_env=False,
        ) as http:
            self._agree()
            try:
                for name, table in self._engines.items():
                    await self._open(name, table, http)
                await self._serve("admin", self._admin(), self._settings.admin)
                log.info("proxy %s: %s", self._settings.name, self.ports)
                ready()
                await self._follow()
            finally:
                for listener in self._listeners:
                    listener.close()
                for runner in self._runners:
                    await runner.cleanup()
                self._record()
                if self._audit is not None:
                    await asyncio.to_thread(self._audit.close)

    def renew_identity(self) -> None:
        """Load the files of the identity.

        Raises:
            ConfigError: They cannot be used; nothing is changed.
        """
        self._settings.identity.refresh(self._context)
        self._agreements.authorities.trust(self._context)

    async def _open(self, name: str, table: SharedEngineTable, http: aiohttp.ClientSession) -> None:
        port = ProxyEnginePort(name, table.url, self._turns, self.connections, self.metrics, http)
        make = partial(GatewayConnection, self.connections)
        tls = {"ssl": self._context, **TLS_LIMITS}
        await self._serve(name, port.app(), split_address(table.listen), make, **tls)

    async def _serve(
        self,
        name: str,
        app: web.Application,
        address: tuple[str, int],
        connection: Callable[[web.Server], PlainHandler] = PlainHandler,
        **tls: Any,
    ) -> None:
        # A gateway that leaves ends its request: the place at the engine is for others.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await runner.setup()
        self._runners.append(runner)
        host, port = address
        try:
            listener = await listen(runner, host, port, connection, **tls)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        self._listeners.append(listener)
        self.ports[name] = int(listener.sockets[0].getsockname()[1])

    def _agree(self) -> None:
        """Put the contracts in force; the gauges of their sites are read at each scrape."""
        sites = self._agreements.contracts.by_site
        self._turns.agree(sites.values())
        for site in sites:
            waiting = partial(self._turns.queue.num_waiting, site)
            self.metrics.waiting.labels(site=site).set_function(waiting)
            num_open = partial(self.connections.__getitem__, site)
            self.metrics.connections.labels(site=site).set_function(num_open)

    async def _follow(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(self._settings.look_s)
            if self._agreements.look():
                self._agreements.authorities.trust(self._context)
                self._agree()
            looks += 1
            if looks % RECORD_LOOKS == 0:
                self._record()

    def _record(self) -> None:
        for key, amounts in self.metrics.meter.take().items():
            if self._audit is not None:
                self._audit.write(usage_record(key, amounts))

    def _admin(self) -> web.Application:
        app = web.Application()
        app.on_response_prepare.append(name_server)

        async def health(_: web.Request) -> web.Response:
            return web.json_response({"status": "ready"})

        async def metrics(_: web.Request) -> web.Response:
            body = generate_latest(self.metrics.registry)
            return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

        app.router.add_get("/health", health)
        app.router.add_get("/metrics", metrics)
        return app


async def serve(settings: ProxySettings, stop: asyncio.Event) -> None:
    """Run a proxy until `stop`; ConfigError if it cannot be started."""
    from prfaas.wire.renewal import Renewal

    raise_descriptor_limit()
    proxy = Proxy(settings)
    renewal = Renewal(
        settings.identity, settings.name, proxy.renew_identity, proxy.metrics.identity_ends
    )
    renewal.watch()
    running = asyncio.create_task(proxy.run())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if running.done():
        running.result()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
