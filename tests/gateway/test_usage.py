"""Token counts: what the client is told, on every path."""

from __future__ import annotations

import pytest

from .conftest import LAYOUT, World, until
from .prompts import LONG, SHORT
from .scripted_engine import refuse


async def cached(world: World, prompt: str = LONG) -> int:
    _, reply = await world.post({"prompt": prompt, "max_tokens": 3})
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == len(prompt) + 3
    record = await world.record()
    assert record["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def test_local_is_what_decode_says(world: World) -> None:
    world.decode.cached_tokens = 1
    assert await cached(world, SHORT) == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "told"), [(0, 320, 0), (64, 320, 64), (320, 320, 320), (320, 64, 64)]
)
async def test_remote_is_what_was_cached_before(
    world: World, prefill: int, decode: int, told: int
) -> None:
    world.prefill.cached_tokens, world.decode.cached_tokens = prefill, decode
    assert await cached(world) == told
    sample = 'prfaas_cached_tokens_total{path="remote"}'
    assert await world.metric(sample) == told


async def test_blocks_of_a_failed_prefill_do_not_count(world: World) -> None:
    """Half the blocks came before the prefill leg failed: computed a moment ago, not cached."""
    await world.post({"prompt": LONG, "max_tokens": 2})
    ids = world.decode.calls[-1].body["prompt"]
    world.pd_pool.store(LAYOUT, world.keys(ids, 64))
    hashes = world.hashes(ids)
    await until(lambda: world.gateway.index.usable_hit("pd-pool", LAYOUT, hashes, len(ids)) == 64)
    world.prefill.script, world.decode.cached_tokens = refuse(500), 192
    assert await cached(world) == 64


async def test_streams_are_told_the_same(world: World) -> None:
    world.prefill.cached_tokens, world.decode.cached_tokens = 64, 320
    stream = await world.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": LONG[:300]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage async for chunk in stream][-1]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert world.decode.calls[0].body["stream_options"]["include_usage"] is True


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_the_fingerprint_ends_each_answer_of_a_stream_without_usage(
    world: World, num_choices: int
) -> None:
    """The engine sends it with the usage, which the gateway alone has asked for."""
    lines = world.decode.chunks

    def with_fingerprint(body, *, chat):  # type: ignore[no-untyped-def]
        *rest, last = lines(body, chat=chat)
        return [*rest, last | {"system_fingerprint": "vllm-x"}]

    world.decode.chunks = with_fingerprint  # type: ignore[method-assign]
    for include_usage in (False, True):
        stream = await world.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": SHORT}],
            n=num_choices,
            stream=True,
            stream_options={"include_usage": include_usage},
        )
        chunks = [chunk async for chunk in stream]
        marked = [chunk.system_fingerprint for chunk in chunks].count("vllm-x")
        assert marked == (1 if include_usage else num_choices)
        assert chunks[-1].system_fingerprint == "vllm-x"
        ends = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert ends.count("stop") == num_choices


@pytest.mark.parametrize("text", [SHORT, LONG])
async def test_a_chat_creates_what_was_not_cached(world: World, text: str) -> None:
    world.prefill.cached_tokens, world.decode.cached_tokens = 64, 64
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    _, reply = await world.post(body, "/v1/chat/completions")
    usage = reply["usage"]
    end = LAYOUT.last_whole_block(usage["prompt_tokens"])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens_details"]["created_cache_tokens"] == max(0, end - cached)
    assert text is SHORT or end > 64


async def test_an_engine_without_details(world: World) -> None:
    async def script(engine, request, body):  # type: ignore[no-untyped-def]
        from aiohttp import web

        answer = engine.whole(body, chat=False)
        del answer["usage"]["prompt_tokens_details"]
        return web.json_response(answer)

    world.decode.script = script
    assert await cached(world, SHORT) == 0


async def test_transfers_are_counted_when_they_arrived(world: World) -> None:
    world.decode.cached_tokens = 320
    await world.post({"prompt": LONG})
    transfer = world.prefill.calls[0].body["kv_transfer_params"]["prfaas"]["transfer"]
    record = await world.record()
    assert (record["kv_bytes"], record["transfer_ms"]) == (0, None)
    assert record["transfer_state"] == "open"
    world.prfaas_pool.end_transfer(transfer, num_bytes=900)
    world.pd_pool.end_transfer(transfer, num_bytes=1000)
    world.pd_pool.end_transfer("ff" * 16, num_bytes=10**9)
    view = world.gateway.transfers._views[bytes.fromhex(transfer)]
    await until(lambda: "pd-pool" in view.ended)
    record = await world.record()
    assert (record["kv_bytes"], record["transfer_ms"]) == (1000, 3.0)
    assert record["transfer_state"] == "committed"
    sample = 'prfaas_kv_bytes_total{destination="pd-pool",source="prfaas-pool"}'
    assert await world.metric(sample) == 1000
    assert await world.metric("prfaas_kv_transfer_seconds_sum") == 0.003
