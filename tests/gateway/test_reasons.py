"""Every reason that the policy knows, brought about from outside."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from .conftest import LAYOUT, World, until
from .prompts import LONG, SHORT


async def routed(world: World, prompt: object = LONG, **fields: object) -> tuple[str, str]:
    status, _ = await world.post({"prompt": prompt, "max_tokens": 2, **fields})
    assert status == 200
    record = await world.record()
    sample = f'prfaas_route_decisions_total{{path="{record["path"]}",reason="{record["reason"]}"}}'
    assert await world.metric(sample) >= 1
    assert record["explanation"]
    return record["path"], record["reason"]


async def test_below_and_above_the_threshold(world: World) -> None:
    assert await routed(world, SHORT) == ("local", "below_threshold")
    assert await routed(world, "x" * 100) == ("local", "below_threshold")
    assert await routed(world, "x" * 101) == ("remote", "above_threshold")


async def test_no_prefill_engine(world: World) -> None:
    world.prefill.healthy = False
    await until(lambda: not world.gateway.engines.by_name["prefill"].is_ready)
    assert await routed(world) == ("local", "no_prefill_instance")
    world.prefill.healthy = True
    await until(lambda: world.gateway.engines.by_name["prefill"].is_ready)
    assert await routed(world) == ("remote", "above_threshold")


async def test_prefill_engine_that_is_too_short(world: World) -> None:
    world.gateway.driver.engine_ready("prefill", len(LONG), time.monotonic_ns())
    assert await routed(world) == ("local", "prompt_too_long")


async def test_link_down(world: World) -> None:
    world.prfaas_pool.links = {"pd-pool": False}
    world.prfaas_pool.tell_state()
    await until(lambda: not world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
    assert await routed(world) == ("local", "link_down")


@pytest.mark.parametrize("which", ["prfaas_pool", "pd_pool"])
async def test_pool_node_down(world: World, which: str) -> None:
    pool = getattr(world, which)
    await pool.stop()
    await until(lambda: not world.gateway.pools.is_live(pool.name))
    assert await routed(world) == ("local", "pool_not_connected")
    await pool.start()
    await until(lambda: world.gateway.pools.link_up("prfaas-pool", "pd-pool"))
    await until(lambda: world.gateway.pools.layout("pd-pool", "decode") is not None)
    assert await routed(world) == ("remote", "above_threshold")


@pytest.mark.parametrize(("which", "engine"), [("prfaas_pool", "prefill"), ("pd_pool", "decode")])
async def test_an_engine_that_its_pool_node_does_not_know(
    world: World, which: str, engine: str
) -> None:
    """It runs without the connector, or its connection is lost; the link is up."""
    pool = getattr(world, which)
    pool.layouts = {}
    pool.tell_state()
    await until(lambda: world.gateway.pools.layout(pool.name, engine) is None)
    assert await routed(world) == ("local", "engine_not_connected")
    record = await world.record()
    assert f"{engine} is not connected to {pool.name}" in record["explanation"]
    assert world.gateway.pools.link_up("prfaas-pool", "pd-pool")


async def test_a_drained_engine_is_named(world: World) -> None:
    world.gateway.driver.set_withheld("prefill", time.monotonic_ns(), withheld=True)
    assert await routed(world) == ("local", "no_prefill_instance")
    assert "prefill is drained" in (await world.record())["explanation"]


async def test_a_pool_node_that_takes_no_transfers(world: World) -> None:
    world.gateway.driver.set_withheld("pd-pool", time.monotonic_ns(), withheld=True)
    assert await routed(world) == ("local", "pool_draining")


async def test_layouts_differ(world: World) -> None:
    world.prfaas_pool.layouts = {"prefill": replace(LAYOUT, layout_id=b"M" * 32)}
    world.prfaas_pool.tell_state()
    pools = world.gateway.pools
    await until(lambda: pools.layout("prfaas-pool", "prefill") != LAYOUT)
    assert await routed(world) == ("local", "layout_mismatch")


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 2},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": 50},
        {"prompt": [LONG, LONG]},
        {"prompt": [[1, 2] * 60, [3] * 120]},
    ],
)
async def test_not_offloadable(world: World, fields: dict[str, Any]) -> None:
    assert await routed(world, **{"prompt": LONG, **fields}) == ("local", "not_offloadable")
    assert not world.prefill.calls


async def test_images_go_to_the_chat_endpoint_as_they_are(world: World) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": LONG}, image]}]
    status, _ = await world.post({"messages": messages}, "/v1/chat/completions")
    assert status == 200
    [call] = world.decode.calls
    assert call.path == "/v1/chat/completions"
    assert call.body["messages"] == messages
    assert "kv_transfer_params" not in call.body
    assert (await world.record())["reason"] == "not_offloadable"


async def test_tools_are_split_by_token_ids(world: World, checkpoint: Path) -> None:
    """Tool parsers live in the chat endpoint; it gets the ids that were prefilled."""
    world.decode.cached_tokens = 384
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    status, reply = await world.post(
        {
            "messages": [{"role": "user", "content": LONG}],
            "tools": [{"type": "function", "function": function}],
        },
        "/v1/chat/completions",
    )
    assert status == 200
    assert reply["kv_transfer_params"] is None
    [prefill], [_, decode] = world.prefill.calls, world.decode.calls
    assert (prefill.path, decode.path) == ("/v1/completions", "/v1/chat/completions")
    parameters = decode.body["kv_transfer_params"]
    assert parameters["prompt_token_ids"] == prefill.body["prompt"]
    assert parameters["prfaas"]["source"] == "prfaas-pool"
    assert "<tools>1" in AutoTokenizer.from_pretrained(checkpoint).decode(prefill.body["prompt"])
    assert decode.body["tools"][0]["function"] == function


@pytest.mark.parametrize("concurrency", [20])
async def test_many_at_once(world: World, concurrency: int) -> None:
    import asyncio

    world.decode.cached_tokens = 4096
    prompts = [LONG if i % 2 else SHORT for i in range(concurrency)]
    replies = await asyncio.gather(
        *(world.post({"prompt": f"{p}{i}", "max_tokens": 3}) for i, p in enumerate(prompts))
    )
    assert {status for status, _ in replies} == {200}
    for (_, reply), prompt, i in zip(replies, prompts, range(concurrency), strict=True):
        assert reply["usage"]["prompt_tokens"] == len(f"{prompt}{i}")
    assert len({call.headers["x-request-id"] for call in world.decode.calls}) == concurrency
    assert await world.metric("prfaas_requests_in_flight") == 0
    assert await world.metric('prfaas_requests_total{outcome="finished",path="remote"}') == 10
    assert all(engine.num_in_flight == 0 for engine in world.gateway.engines.by_name.values())
    transfers = {
        call.body["kv_transfer_params"]["prfaas"]["transfer"] for call in world.prefill.calls
    }
    assert len(transfers) == 10
