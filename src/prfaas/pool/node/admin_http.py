"""Health and metrics of a pool node, over plain HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum

from aiohttp import web
from prometheus_client import generate_latest

from prfaas.config.addresses import join_address
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.series import CONTENT_TYPE
from prfaas.wire.plain_http import listen, name_server


class NodePhase(StrEnum):
    """State of a pool node, as `/health` reports it."""

    STARTING = "starting"
    """True until all ports are open."""
    READY = "ready"
    DRAINING = "draining"
    """It accepts no new transfers, and stops once those under way have ended."""
    FAILED = "failed"
    """The thread that moves blocks has ended: only a restart helps."""


class AdminServer:
    """Answers `/health`, `/live` and `/metrics`.

    Args:
        address: Host and port to listen on.
        phase: Returns the state of the node.
    """

    def __init__(
        self, counted: PoolMetrics, address: tuple[str, int], phase: Callable[[], NodePhase]
    ) -> None:
        self._counted, self._address, self._phase = counted, address, phase
        self._runner = web.AppRunner(self._app(), access_log=None)
        self._listener: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Its port; 0 before it is open."""
        if self._listener is None or not self._listener.sockets:
            return 0
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{join_address((self._address[0], self.port))}"

    async def open(self) -> None:
        """Listen; OSError if the address cannot be listened on."""
        await self._runner.setup()
        self._listener = await listen(self._runner, *self._address)

    async def close(self) -> None:
        """Stop serving."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application()
        app.on_response_prepare.append(name_server)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/live", self._live),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        """Return 200 if the node accepts transfers."""
        phase = self._phase()
        return _answer(phase, is_well=phase is NodePhase.READY)

    async def _live(self, _: web.Request) -> web.Response:
        """Return 503 if only a restart helps."""
        phase = self._phase()
        return _answer(phase, is_well=phase is not NodePhase.FAILED)

    async def _metrics(self, _: web.Request) -> web.Response:
        self._counted.on_read()
        body = generate_latest(self._counted.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _answer(phase: NodePhase, *, is_well: bool) -> web.Response:
    return web.json_response({"status": phase.value}, status=200 if is_well else 503)
