"""Both paths, both APIs, streamed and not, through the official client."""

from __future__ import annotations

import pytest

from .conftest import LAYOUT, World, until
from .prompts import LONG, SHORT


@pytest.mark.parametrize(("prompt", "path"), [(SHORT, "local"), (LONG, "remote")])
async def test_completion(world: World, prompt: str, path: str) -> None:
    world.decode.cached_tokens = 320 if path == "remote" else 0
    reply = await world.openai.completions.with_raw_response.create(
        model="tiny", prompt=prompt, max_tokens=3, temperature=0
    )
    completion = reply.parse()
    assert completion.choices[0].text == "Hello there!"
    assert completion.id == f"cmpl-{reply.headers['x-request-id']}"
    assert reply.headers["x-prfaas-path"] == path
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    assert len(world.prefill.calls) == (path == "remote")
    record = await world.record()
    assert record["outcome"] == "finished"
    assert record["path"] == path
    assert record["fallback"] is None


async def test_the_legs_of_a_remote_request(world: World) -> None:
    world.decode.cached_tokens = 320
    await world.openai.completions.create(
        model="tiny",
        prompt=LONG,
        max_tokens=3,
        extra_headers={"X-Request-Id": "r1", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
    )
    [prefill], [decode] = world.prefill.calls, world.decode.calls
    assert prefill.path == decode.path == "/v1/completions"
    assert prefill.headers["x-request-id"] == "r1-p"
    assert decode.headers["x-request-id"] == "r1-d"
    assert prefill.headers["traceparent"] == decode.headers["traceparent"]
    ids = decode.body["prompt"]
    assert len(ids) == len(LONG)
    pushed = prefill.body.pop("kv_transfer_params")["prfaas"]
    assert prefill.body == {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": 1,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "cache_salt": world.salt,
    }
    await until(lambda: bool(world.pd_pool.releases))
    assert [told.transfer_id.hex() for told in world.pd_pool.releases] == [pushed["transfer"]]
    assert not world.prfaas_pool.releases
    assert not world.pd_pool.aborts
    assert pushed == {
        "transfer": pushed["transfer"],
        "push_to": "pd-pool",
        "have_tokens": 0,
        "final_tokens": 320,
        "ticket": pushed["ticket"],
    }
    assert decode.body["cache_salt"] == world.salt
    assert decode.body["kv_transfer_params"]["prfaas"] == {
        "transfer": pushed["transfer"],
        "source": "prfaas-pool",
        "wait_ms": 10_000,
    }


async def test_the_pd_pools_cache_counts(world: World) -> None:
    """With a prefix at home only the rest counts, and only the rest is asked for."""
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    ids = world.decode.calls[-1].body["prompt"]
    world.pd_pool.store(LAYOUT, world.keys(ids, 192))
    index = world.gateway.index
    await until(lambda: index.usable_hit("pd-pool", LAYOUT, world.hashes(ids), len(ids)) == 192)
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    assert (await world.record())["num_new_tokens"] == len(LONG) - 192
    pushed = world.prefill.calls[-1].body["kv_transfer_params"]["prfaas"]
    assert pushed["have_tokens"] == 192
    world.pd_pool.store(LAYOUT, world.keys(ids, 320))
    await until(lambda: index.usable_hit("pd-pool", LAYOUT, world.hashes(ids), len(ids)) == 320)
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    record = await world.record()
    assert (record["path"], record["reason"]) == ("local", "below_threshold")


@pytest.mark.parametrize("prompt", [SHORT, LONG])
async def test_streamed_completion(world: World, prompt: str) -> None:
    world.decode.cached_tokens = 320 if prompt is LONG else 0
    stream = await world.openai.completions.create(
        model="tiny", prompt=prompt, max_tokens=3, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there!"
    assert all(chunk.usage is None for chunk in chunks)
    record = await world.record()
    assert record["ttft_ms"] is not None
    assert record["num_output_tokens"] == 3


@pytest.mark.parametrize("content", [SHORT, LONG])
async def test_chat(world: World, content: str) -> None:
    world.decode.cached_tokens = 384
    chat = await world.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], temperature=0
    )
    assert chat.choices[0].message.content == "Hello there!"
    assert chat.choices[0].message.role == "assistant"
    assert chat.object == "chat.completion"
    [call] = world.decode.calls
    assert call.path == "/v1/completions"
    assert call.body["max_tokens"] == 4096 - len(call.body["prompt"])
    assert "messages" not in call.body
    assert len(world.prefill.calls) == (content is LONG)


async def test_streamed_chat(world: World) -> None:
    stream = await world.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": SHORT}],
        stream=True,
        n=2,
        max_completion_tokens=3,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    roles = [(c.choices[0].index, c.choices[0].delta.role) for c in chunks[:2]]
    assert roles == [(0, "assistant"), (1, "assistant")]
    for index in range(2):
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(d.delta.content or "" for d in deltas) == "Hello there!"
        assert deltas[-1].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert world.decode.calls[0].body["max_tokens"] == 3


async def test_continuous_usage(world: World) -> None:
    stream = await world.openai.completions.create(
        model="tiny",
        prompt=SHORT,
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    chunks = [chunk async for chunk in stream]
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [1, 2, 3, 3]
