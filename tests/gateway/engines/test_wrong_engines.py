"""Servers that do not answer as engines do: operators learn what each answered."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prfaas.config.clusters import ClusterRole
from prfaas.core.resilience.quarantine import Guards
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.engines.engine_probes import EngineProbes
from prfaas.gateway.routing.dispatch_driver import Driver

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answers(status: int, body: str = "", kind: str = "application/json", **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body, content_type=kind, headers=headers)

    return handler


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (answers(401, "{}"), "/v1/models answers 401; gateways send engines no key: start it with"),
        (answers(403, "{}"), "/v1/models answers 403; gateways send engines no key"),
        (answers(302, Location="https://login.example.net/"), "/v1/models answers 302; its url"),
        (answers(404, "{}"), "/v1/models answers 404; its url has to be that of an engine itself"),
        (answers(200, "<html>", "text/html"), "/v1/models answers no JSON; its url has to be"),
        (answers(200, '{"data": [{"id": "other"}]}'), "it does not serve 'm'"),
        (answers(502, "bad"), "/v1/models answers 502"),
    ],
)
async def test_each_wrong_answer_is_logged_once_and_shown(
    models: Handler, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = web.Application()
    app.add_routes([web.get("/health", answers(200)), web.get("/v1/models", models)])
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        engine = Engine("e", str(server.make_url("")).rstrip("/"), ClusterRole.PD, "pool")
        probes = EngineProbes({}, "m", cast(Driver, None), cast(Guards, None), 60.0, 60.0)
        probes.start(http)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                await probes.look(engine)
        assert not engine.is_ready
        assert words in engine.why_down
        assert [r.getMessage().split()[0] for r in caplog.records] == ["engine_not_ready"]
        await probes.close()
