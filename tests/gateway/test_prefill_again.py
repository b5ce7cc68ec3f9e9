"""A prefill that fails and is made by another engine, over HTTP and with its transfers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.gateway.conftest import running
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.tenant_keys import bearer, tenants

BLOCKS_BYTES = 20 * 1024 + 2048


@pytest.mark.parametrize("stream", [False, True])
async def test_another_engine_prefills_what_one_failed_at(
    checkpoint: Path, identities: Path, tmp_path: Path, stream: bool
) -> None:
    """Decode waits for its blocks, and both transfers are charged on the tenant's limit."""
    limits = tenants(link_rate="1Gbps")
    async with running(
        checkpoint, identities, tmp_path / "state", tenants=limits, others=("second",)
    ) as world:
        world.decode.cached_tokens = 320
        asked: list[str] = []

        async def fail_first(
            engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            asked.append(engine.name)
            if len(asked) == 1:
                return web.Response(status=503)
            return await engine.answer(request, body)

        both = (world.prefill, *world.others)
        for engine in both:
            engine.script = fail_first
        body = {"prompt": LONG, "max_tokens": 3, "stream": stream}
        async with world.http.post(
            f"{world.url}/v1/completions", json=body, headers=bearer("red")
        ) as response:
            assert response.status == 200
            assert response.headers["X-Prfaas-Path"] == "remote"
            await response.read()
        assert sorted(asked) == ["prefill", "second"]
        record = await world.record()
        assert record["prefill_engine"] == asked[1]
        assert record["fallback"] == {"stage": "prefill", "reason": "status_5xx"}
        charged = await world.metric('prfaas_tenant_link_bytes_total{tenant="red"}')
        assert charged == 2 * BLOCKS_BYTES
        last = next(engine for engine in both if engine.name == asked[1])
        [order] = [call.body["kv_transfer_params"]["prfaas"] for call in last.calls]
        waits = world.decode.calls[0].body["kv_transfer_params"]["prfaas"]
        assert waits["transfer"] == order["transfer"]
