"""The gateway's answers beside those of vLLM itself, field by field."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from prfaas.core.kv.tenant_salts import salt_of
from tests.live.conftest import Live, document

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]

TOOL = {
    "type": "function",
    "function": {"parameters": {"type": "object", "properties": {}}, "name": "find", "extra": 1},
}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Grüße"}, {"type": "text", "text": "!"}]},
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
CHATS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "seed": 5, "temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"logprobs": True, "top_logprobs": 3},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL]},
    {"tools": []},
    {"stop": "e", "include_stop_str_in_output": True, "max_tokens": None, "min_tokens": 2},
    {"response_format": SCHEMA, "max_completion_tokens": 6},
    {"ignore_eos": True, "logit_bias": {"65": 100}},
    {"logit_bias": {"999999": 1}},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"user": "u", "service_tier": "auto", "store": True, "metadata": {"a": "b"}},
)
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2, "echo": True},
    {"suffix": "x"},
    {"prompt": ["a b c", "d e f"], "n": 2, "temperature": 0},
    {"prompt": [65, 66, 67]},
    {"response_format": {"type": "json_schema"}},
)
OTHERS = ("id", "created", "cached_tokens", "created_cache_tokens", "kv_transfer_params")
"""What differs from one answer to the next, or counts what caches hold."""


def bare(value: Any) -> Any:
    """An answer without values that may differ; their keys stay, and so does null."""
    if isinstance(value, dict):
        return {k: k if k in OTHERS and v is not None else bare(v) for k, v in value.items()}
    return [bare(each) for each in value] if isinstance(value, list) else value


def shape(value: Any) -> Any:
    """Keys of a chunk, and where it has null, in a form that sets can hold."""
    if isinstance(value, dict):
        return tuple(sorted((k, shape(v)) for k, v in value.items()))
    if isinstance(value, list):
        return tuple(shape(each) for each in value)
    return "null" if value is None else "value"


async def ask(live: Live, base: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with live.http.post(base + path, json={"model": live.model} | body) as reply:
        if not body.get("stream") or reply.status != 200:
            return reply.status, bare(await reply.json())
        events = (await reply.text()).split("\n\n")
        chunks = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
        return reply.status, joined([bare(chunk) for chunk in chunks])


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream without regard to where its text was cut, or the error that it is."""
    if "error" in chunks[0]:
        return chunks[0]
    texts: dict[tuple[int, str], str] = {}
    ends: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {"text": choice.get("text", "")}
            for key, text in delta.items():
                if text is None:
                    continue
                where = choice["index"], key
                texts[where] = texts.get(where, "") + str(text)
            ends[choice["index"]] = choice.get("finish_reason") or ends.get(choice["index"])
    kinds = {(chunk["object"], chunk["model"]) for chunk in chunks}
    return {
        "texts": texts,
        "ends": ends,
        "kinds": kinds,
        "shapes": {shape(chunk) for chunk in chunks},
        "usage": chunks[-1].get("usage"),
        "fingerprint": chunks[-1].get("system_fingerprint"),
    }


async def same(live: Live, path: str, body: dict[str, Any]) -> int:
    """Ask both, compare, and tell the status."""
    engine = live.topology.engines["pd-engine"]
    ours, vllms = [await ask(live, base, path, body) for base in (live.url, engine)]
    assert ours == vllms, body
    return ours[0]


async def test_answers_and_errors_are_vllms(live: Live) -> None:
    statuses = []
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    for fields in CHATS:
        body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0} | fields
        statuses.append(await same(live, "/v1/chat/completions", body))
        if "logprobs" not in fields:
            statuses.append(await same(live, "/v1/chat/completions", body | usage))
    for fields in ({"stream": True}, {"stream": True, "stream_options": continuous}):
        body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0} | fields
        statuses.append(await same(live, "/v1/chat/completions", body))
        body = {"prompt": "One two three", "max_tokens": 8, "temperature": 0} | fields
        statuses.append(await same(live, "/v1/completions", body))
    for fields in COMPLETIONS:
        body = {"prompt": "One two three", "max_tokens": 8, "temperature": 0} | fields
        statuses.append(await same(live, "/v1/completions", body))
    assert statuses.count(200) > 20
    assert set(statuses) == {200, 400}


async def test_what_a_chat_creates_in_caches_is_what_vllm_counts(live: Live) -> None:
    """Local and remote, new and cached, below a block and above."""
    engine, salt = live.topology.engines["pd-engine"], secrets.token_hex(8)
    for num_chars in (200, 1000, 2600):
        for _ in range(2):
            counted = []
            for base, more in ((live.url, {}), (engine, {"cache_salt": salt})):
                text = f"{num_chars} {salt} {document(num_chars)}"
                body = live.chat_body(text, max_tokens=1, **more)
                async with live.http.post(f"{base}/v1/chat/completions", json=body) as reply:
                    counted.append((await reply.json())["usage"])
            assert counted[0] == counted[1], num_chars


async def test_tokens_are_vllms(live: Live) -> None:
    for fields in (
        {"prompt": "Grüße <|im_end|> 🙂", "return_token_strs": True},
        {"prompt": "a", "add_special_tokens": False},
        {"messages": MESSAGES},
        {"messages": MESSAGES, "tools": [TOOL]},
        {"messages": MESSAGES, "add_generation_prompt": False, "continue_final_message": True},
    ):
        assert await same(live, "/tokenize", fields) == 200
    assert await same(live, "/detokenize", {"tokens": [72, 105, 0, 200]}) == 200


async def test_an_engine_finds_no_block_of_another_tenant(live: Live) -> None:
    engine, secret = live.topology.engines["pd-engine"], secrets.token_bytes(32)
    cached = []
    for tenant in ("red", "blue", "red"):
        body = live.chat_body(document(2500), cache_salt=salt_of(secret, tenant), max_tokens=1)
        async with live.http.post(f"{engine}/v1/chat/completions", json=body) as reply:
            details = (await reply.json())["usage"]["prompt_tokens_details"]
        cached.append((details or {}).get("cached_tokens") or 0)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
