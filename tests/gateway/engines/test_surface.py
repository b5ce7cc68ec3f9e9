"""Endpoints for benchmark clients and operators."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas.cli.deploy.demo_command import link_line
from prfaas.gateway.engines.engine import Engine
from prfaas.wire.messages.gateway import LinkTelemetry
from tests.gateway.conftest import World, until
from tests.gateway.prompts import LONG, SHORT
from tests.gateway.scripted_engine import hang


async def test_models(world: World) -> None:
    [model] = (await world.openai.models.list()).data
    assert model.id == "tiny"
    assert model.model_dump()["max_model_len"] == 4096


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes(world: World, method: str, path: str) -> None:
    async with world.http.request(method, world.url + path) as response:
        assert response.status == 200


async def test_every_metric_is_there(world: World) -> None:
    await world.post({"prompt": LONG})
    async with world.http.get(f"{world.url}/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for name in (
        "requests_total",
        "route_decisions_total",
        "fallback_total",
        "kv_bytes_total",
        "kv_transfer_seconds",
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "prompt_tokens_total",
        "cached_tokens_total",
        "offload_threshold_tokens",
        "pool_connected",
        "index_blocks",
        "index_state",
        "engine_ready",
        "requests_in_flight",
        "requests_refused_total",
        "ttft_over_predicted_ratio",
    ):
        assert f"# HELP prfaas_{name.removesuffix('_total')}" in text, name
    pair = '{destination="pd-pool",source="prfaas-pool"}'
    assert await world.metric(f"prfaas_offload_threshold_tokens{pair}") == 100
    assert await world.metric('prfaas_engine_ready{engine="decode",role="pd"}') == 1
    assert await world.metric('prfaas_engine_ready{engine="spare",role="pd"}') == 0
    assert await world.metric('prfaas_kv_transfer_seconds_bucket{le="60.0"}') == 0


async def test_an_engine_that_its_pool_node_lost_is_counted_and_named(world: World) -> None:
    name = 'prfaas_engine_detached{engine="decode"}'
    assert await world.metric(name) == 0
    lost = world.pd_pool.layouts.pop("decode")
    world.pd_pool.tell_state()
    await until(lambda: world.gateway.pools.lacks("pd-pool", "decode"))
    assert await world.metric(name) == 1
    world.pd_pool.layouts["decode"] = lost
    world.pd_pool.tell_state()
    await until(lambda: not world.gateway.pools.lacks("pd-pool", "decode"))
    assert await world.metric(name) == 0


async def test_links_show_what_was_measured_of_them(world: World) -> None:
    measured: dict[str, Any] = dict.fromkeys(LinkTelemetry.__struct_fields__, 7)
    measured |= {"rtt_ns": 40_000_000, "queued_by_tenant": {"a": 7}, "encryption": "sealed"}
    world.prfaas_pool.telemetry = {"pd-pool": LinkTelemetry(**measured)}
    world.prfaas_pool.tell_state()
    await until(lambda: bool(world.gateway.pools.telemetry()))
    async with world.http.get(f"{world.url}/control/links") as response:
        (link,) = (await response.json())["links"]
    assert (link["source"], link["destination"]) == ("prfaas-pool", "pd-pool")
    assert link["is_up"] is True
    assert {name: link[name] for name in measured} == measured
    assert "40.0 ms, 7 segments sent again" in link_line(link)


async def test_aiperf_and_guidellm(world: World) -> None:
    """Their headers and fields, as captured in the field notes."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": SHORT}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 3,
        "ignore_eos": True,
    }
    headers = {
        "X-Request-ID": "aiperf-1",
        "X-Correlation-ID": "c",
        "X-Session-Affinity": "s",
        "Accept": "text/event-stream",
        "Accept-Encoding": "gzip, deflate, br",
    }
    async with world.http.post(
        f"{world.url}/v1/chat/completions", json=body, headers=headers
    ) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Request-Id"] == "aiperf-1"
        assert response.headers["X-Prfaas-Path"] == "local"
        assert response.headers["X-Prfaas-Reason"] == "below_threshold"
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    assert '"choices":[]' in text
    assert '"cached_tokens":0' in text
    call = world.decode.calls[0].body
    assert call["ignore_eos"] is True
    assert call["max_tokens"] == 3


async def test_records(world: World) -> None:
    world.decode.cached_tokens = 320
    for i in range(3):
        headers = {"X-Request-Id": f"r{i}"}
        async with world.http.post(
            f"{world.url}/v1/completions", json={"prompt": LONG}, headers=headers
        ):
            pass
    async with world.http.get(f"{world.url}/control/requests?limit=2") as response:
        listed = (await response.json())["requests"]
    assert [record["request_id"] for record in listed] == ["r2", "r1"]
    async with world.http.get(f"{world.url}/control/requests/r0") as response:
        record = await response.json()
    assert record["path"] == "remote"
    assert record["reason"] == "above_threshold"
    assert record["explanation"] == "long: 360 new tokens against 100"
    assert record["num_prompt_tokens"] == record["num_new_tokens"] == 360
    assert record["prefill_engine"] == "prefill"
    assert record["decode_engine"] == "decode"
    assert record["source_pool"] == "prfaas-pool"
    assert record["prefill_ms"] > 0
    assert record["e2e_ms"] > record["prefill_ms"]


async def test_the_least_busy_engine_decodes(world: World) -> None:
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    for engine in (world.decode, world.spare):
        engine.script = hang
    async with asyncio.TaskGroup() as group:
        posts = [group.create_task(world.post({"prompt": SHORT})) for _ in range(6)]
        await until(lambda: len(world.spare.calls) + len(world.decode.calls) == 6)
        assert len(world.spare.calls) == len(world.decode.calls) == 3
        for post in posts:
            post.cancel()


async def test_an_engine_that_serves_another_model_is_not_ready(world: World) -> None:
    world.spare.model = "other"
    world.spare.healthy = True
    world.gateway.engines.by_name["decode"].is_ready = False
    await until(lambda: world.gateway.engines.by_name["decode"].is_ready)
    assert not world.gateway.engines.by_name["spare"].is_ready


async def test_an_engine_that_is_slow_to_say_it_is_well_stays_ready(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.gateway.engines.by_name["decode"]
    ready: list[bool] = []

    async def no_answer(looked_at: object, _: str) -> bytes:
        if looked_at is engine:
            ready.append(engine.is_ready)
        raise TimeoutError

    monkeypatch.setattr(world.gateway.engines.probes, "_get", no_answer)
    await until(lambda: not engine.is_ready)
    assert ready == [True] * 3
    assert engine.num_missed == 3


async def test_an_engine_that_is_ready_lists_its_adapters_at_every_fourth_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, probes = world.gateway.engines.by_name["decode"], world.gateway.engines.probes
    await probes.close()
    asked: list[str] = []
    get = probes._get

    async def counted(looked_at: Engine, path: str) -> bytes:
        asked.append(path)
        return await get(looked_at, path)

    monkeypatch.setattr(probes, "_get", counted)
    for _ in range(8):
        await probes.look(engine)
    assert [asked.count(path) for path in ("/health", "/metrics", "/v1/models")] == [8, 8, 2]
