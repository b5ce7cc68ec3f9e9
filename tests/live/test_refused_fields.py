"""Requests that a real vLLM refuses are not prefilled by another one first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.live.conftest import LEFT, Live, document

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def posted(live: Live, fields: dict[str, Any], text: str) -> tuple[int, float, Any, str]:
    """Status, prompt tokens that the PrfaaS engine computed, the answer, and the fallback."""
    remote = live.topology.engines["prfaas-engine"]
    before = await live.metric(remote, "vllm:prompt_tokens_total")
    body = live.chat_body(text, max_tokens=4, **fields)
    async with live.http.post(f"{live.url}/v1/chat/completions", json=body) as reply:
        answer = await reply.json()
    computed = await live.metric(remote, "vllm:prompt_tokens_total") - before
    return reply.status, computed, answer, reply.headers.get("X-Prfaas-Fallback", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"n": 2, "temperature": 0},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": 7}},
            }
        },
        {"structured_outputs": {"regex": "("}},
        {"logit_bias": {"100000000": 1}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_fields_that_only_decode_refuses(live: Live, fields: dict[str, Any]) -> None:
    text = f"{next(iter(fields))} " + document(5000)
    status, computed, answer, fallback = await posted(live, fields, text)
    assert (status, computed, fallback) == (400, 0.0, "prefill/refused"), answer


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"n": 2, "temperature": 0.5},
        {"structured_outputs": {"regex": "[ab]+"}},
        {"min_tokens": 2},
        {"logprobs": True, "top_logprobs": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_fields_that_decode_takes_are_shipped(live: Live, fields: dict[str, Any]) -> None:
    for attempt in range(3):
        text = f"taken {attempt} {next(iter(fields))} " + document(5000)
        status, computed, answer, fallback = await posted(live, fields, text)
        if fallback not in LEFT:
            break
    assert status == 200, answer
    assert computed > 4000
    assert fallback == ""
