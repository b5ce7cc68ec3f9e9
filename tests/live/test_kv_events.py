"""KV events of real vLLM engines in the gateway's index."""

from __future__ import annotations

from typing import Any

import pytest

from tests.live.conftest import Live, document, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="session"),
]

BLOCK_TOKENS = 384


async def seen(live: Live, text: str, engine: str, hit_tokens: int) -> dict[str, Any]:
    """Hits of an engine in the index, once they have a given length of a prompt."""

    async def found() -> dict[str, Any] | None:
        entry = (await live.look(text))[engine]
        return entry if (entry["state"], entry["hit_tokens"]) == ("exact", hit_tokens) else None

    return await until(found)


def usable(answer: dict[str, Any]) -> int:
    """The longest prefix of its prompt that can be cached."""
    return int((answer["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


async def test_the_index_holds_what_engines_hold_and_forgets_what_they_reset(live: Live) -> None:
    short, long = "[kept] " + document(1300), "[shipped] " + document(3000)
    answers = {text: await live.chat(text) for text in (short, long)}
    assert [answers[text][1]["X-Prfaas-Path"] for text in answers] == ["local", "remote"]

    length = usable(answers[short][0])
    assert length == 3 * BLOCK_TOKENS
    groups = (await seen(live, short, "pd-engine", length))["groups"]
    assert [group["num_blocks_held"] for group in groups] == [1, 1, 1, 3]
    assert (await live.look(short))["prfaas-engine"]["hit_tokens"] == 0
    for engine in ("prfaas-engine", "pd-engine"):
        await seen(live, long, engine, usable(answers[long][0]))

    url = f"{live.topology.engines['pd-engine']}/reset_prefix_cache"

    async def is_reset() -> bool:
        async with live.http.post(url) as reply:
            return bool((await reply.json())["success"])

    await until(is_reset)
    # vLLM tells it with its next step.
    await live.chat("Go on.")
    for text in answers:
        found = await seen(live, text, "pd-engine", 0)
        assert not any(group["num_blocks_held"] for group in found["groups"])
        assert (await live.look(text))["pd-pool"]["hit_tokens"] == usable(answers[text][0])
    await seen(live, long, "prfaas-engine", usable(answers[long][0]))

    # What comes back from the pool is told as well.
    await live.chat(short)
    await seen(live, short, "pd-engine", length)
