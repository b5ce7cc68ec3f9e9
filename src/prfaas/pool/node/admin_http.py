"""Health and metrics of a pool node, over plain HTTP."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas.config.addresses import join_address
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.wire.plain_http import listen, name_server


class AdminServer:
    """Answers `/health` and `/metrics`.

    Args:
        counted: What it shows.
        address: Where it listens.
    """

    def __init__(self, counted: PoolMetrics, address: tuple[str, int]) -> None:
        self._counted, self._address = counted, address
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
        """Listen.

        Raises:
            OSError: The address can not be listened on.
        """
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
        app.add_routes([web.get("/health", _health), web.get("/metrics", self._metrics)])
        return app

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._counted.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _health(_: web.Request) -> web.Response:
    return web.Response()
