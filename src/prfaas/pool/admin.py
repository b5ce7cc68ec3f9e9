"""Health and metrics of a pool node, over plain HTTP."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas.pool.metrics import PoolMetrics


def admin_app(counted: PoolMetrics) -> web.Application:
    """What answers `/health` and `/metrics`."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def metrics(_: web.Request) -> web.Response:
        body = generate_latest(counted.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics)])
    return app
