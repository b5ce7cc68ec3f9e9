"""The first token from the engine that prefills, with real engines: the words are those of one."""

from __future__ import annotations

import json
import random
import secrets
from typing import Any

import pytest

from tests.live.conftest import Live, document

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3000),
    pytest.mark.asyncio(loop_scope="session"),
]
ASCII = list(range(32, 127))
"""Tokens of one character, in a vocabulary of bytes: others are parts of one."""
NEAR_TIES: list[str] = []
"""Answers that differ as those of an engine after a preemption do."""
SAMPLING: list[dict[str, Any]] = [
    {},
    {"allowed_token_ids": ASCII},
    {"allowed_token_ids": ASCII, "max_tokens": 2},
    {"allowed_token_ids": ASCII, "max_tokens": 1},
    {"temperature": 1.0, "top_k": 1, "allowed_token_ids": ASCII},
    {"temperature": 1.0, "top_p": 1e-6, "allowed_token_ids": ASCII},
    {"temperature": 1.0, "min_p": 1.0, "allowed_token_ids": ASCII},
    {"repetition_penalty": 1.3, "allowed_token_ids": ASCII},
    {"logit_bias": {str(token): 20 for token in range(97, 123)}},
    {"min_tokens": 5, "allowed_token_ids": ASCII, "stop_token_ids": ASCII[:60]},
    {"stop_token_ids": ASCII, "allowed_token_ids": ASCII},
    {"stop_token_ids": ASCII[::3], "allowed_token_ids": ASCII},
    {"ignore_eos": True, "allowed_token_ids": ASCII},
    {"seed": 7, "allowed_token_ids": ASCII},
    {"skip_special_tokens": False, "allowed_token_ids": ASCII},
]


async def ask(live: Live, url: str, body: dict[str, Any], request_id: str = "x") -> dict[str, Any]:
    """An answer, streamed or not: its text, its counts and its end."""
    headers = {"X-Request-Id": request_id}
    async with live.http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        if not body["stream"]:
            answer = await reply.json()
            [choice] = answer["choices"]
            return dict(answer["usage"], text=choice["text"], **ends(choice))
        events = [json.loads(line[6:]) async for line in reply.content if line[:7] == b"data: {"]
    choices = [event["choices"][0] for event in events if event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return dict(events[-1]["usage"], text=text, **ends(choices[-1]))


def ends(choice: dict[str, Any]) -> dict[str, Any]:
    return {key: choice[key] for key in ("finish_reason", "stop_reason")}


async def compare(live: Live, draw: random.Random, extra: dict[str, Any], stream: bool) -> str:
    """One request, to the gateway and to an engine that has the prompt in its cache.

    Returns:
        The leg that gave the first token.
    """
    salt = secrets.token_hex(6)
    prompt = f"{salt} " + document(draw.randrange(1500, 4000), start=draw.randrange(5000))
    body = {"model": live.model, "prompt": prompt, "max_tokens": 8, "temperature": 0} | extra
    body |= (
        {"stream": True, "stream_options": {"include_usage": True}} if stream else {"stream": False}
    )
    engine = live.topology.engines["pd-engine"]
    await ask(live, engine, body | {"cache_salt": salt, "max_tokens": 1, "min_tokens": 0})
    expected = await ask(live, engine, body | {"cache_salt": salt})
    # A stop string that begins anywhere: of the first token, or across the seam.
    if draw.random() < 0.5 and len(text := expected["text"]) > 2 and stream:
        start = draw.randrange(2)
        body["stop"] = [text[start : start + draw.randrange(1, 4)], text[:1] + "\0"]
        expected = await ask(live, engine, body | {"cache_salt": salt})
    assert expected["prompt_tokens_details"]["cached_tokens"] > 1000
    request_id = f"first-{salt}"
    said = await ask(live, live.url, body, request_id)
    assert said.pop("prompt_tokens_details")["cached_tokens"] == 0
    del expected["prompt_tokens_details"]
    if said != expected and not is_greedy(body):
        await same_from_the_seam(live, body, salt, said)
        NEAR_TIES.append(said["text"])
    else:
        assert said == expected, body
    record = await live.record(request_id)
    assert (record["path"], record["fallback"]) == ("remote", None), record
    assert record["num_output_tokens"] == expected["completion_tokens"]
    return str(record["first_token_from"])


def is_greedy(body: dict[str, Any]) -> bool:
    return body["temperature"] == 0 or body.get("top_k") == 1


async def same_from_the_seam(
    live: Live, body: dict[str, Any], salt: str, said: dict[str, Any]
) -> None:
    """An answer that differs is what one engine says after the first token.

    It computes that token as a part of the prompt, in another order of additions than by itself, so
    that two tokens of nearly equal probability may swap, as after a preemption within an engine.
    """
    engine, ids = live.topology.engines["pd-engine"], list[int]()
    for text in (body["prompt"], said["text"][0]):
        async with live.http.post(f"{engine}/tokenize", json={"prompt": text}) as reply:
            ids += (await reply.json())["tokens"]
    rest = body | {"prompt": ids, "max_tokens": body["max_tokens"] - 1, "cache_salt": salt}
    if "min_tokens" in body:
        rest["min_tokens"] = body["min_tokens"] - 1
    there = await ask(live, engine, rest)
    assert said["text"] == said["text"][0] + there["text"], body
    assert said["finish_reason"] == there["finish_reason"]


@pytest.mark.parametrize(
    "count", [2 * len(SAMPLING), pytest.param(1000, marks=pytest.mark.nightly)]
)
async def test_the_words_are_those_of_one_engine(live: Live, count: int) -> None:
    draw = random.Random(36)
    legs = []
    for number in range(count):
        extra = SAMPLING[number % len(SAMPLING)]
        legs.append(await compare(live, draw, extra, stream=number // len(SAMPLING) % 2 == 0))
    print(f"{count} answers, {len(NEAR_TIES)} near ties; from prefill: {legs.count('prefill')}")
    assert len(NEAR_TIES) < 0.1 * count
    assert legs.count("prefill") > 0.4 * count
    assert await live.metric(live.url, "prfaas_requests_in_flight") == 0
