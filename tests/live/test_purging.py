"""Real engines forget what they hold, whatever they are doing, and go on."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from typing import Any

import pytest

from tests.live.conftest import Live, document

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]
OTHERS_MAX = 4
"""Of 48 tokens."""


async def purge(live: Live) -> dict[str, Any]:
    url = f"{live.url}/control/purge"
    async with live.http.post(url, json={"source": "prfaas-pool"}) as reply:
        report: dict[str, Any] = await reply.json()
        assert reply.status == 200, report
        return report


async def held(live: Live, text: str) -> dict[str, int]:
    """Tokens of a chat that each pool node and engine holds."""
    return {name: found["hit_tokens"] for name, found in (await live.look(text)).items()}


async def test_after_a_purge_nobody_holds_what_came_and_the_next_prompt_is_right(
    live: Live,
) -> None:
    text = "Purge this. " + document(3000, start=800)
    _, headers = await live.chat(text)
    assert headers["X-Prfaas-Path"] == "remote"
    before = await held(live, text)
    assert before["pd-pool"] > 0
    report = await purge(live)
    assert report["is_complete"], report
    amounts = {pool["name"]: pool["num_blocks"] for pool in report["pools"]}
    assert amounts["pd-pool"] > 0
    assert (await held(live, text))["pd-pool"] == 0
    assert not any((await held(live, text)).values())
    answer, headers = await live.chat(text)
    assert headers["X-Prfaas-Path"] == "remote"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"][0]["message"]["content"] == await live.alone(text, "purged")


async def test_engines_forget_under_load(live: Live) -> None:
    """Prompts are computed, handed over, loaded and decoded while a purge runs."""
    texts = [f"[{n}] crowd. " + document(2500, start=100 * n) for n in range(4)]
    crowd = [asyncio.create_task(live.chat(text, max_tokens=48)) for text in texts]

    async def running() -> bool:
        url = live.topology.engines["pd-engine"]
        return await live.metric(url, "vllm:num_requests_running") > 0

    while not await running() and not all(task.done() for task in crowd):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    report = await purge(live)
    answers = await asyncio.gather(*crowd)
    assert report["is_complete"], report
    for text, (answer, _) in zip(texts, answers, strict=True):
        said = answer["choices"][0]["message"]["content"]
        assert await num_other_tokens(live, text, said) <= OTHERS_MAX, said
    again, _ = await live.chat(texts[0])
    said = again["choices"][0]["message"]["content"]
    assert await num_other_tokens(live, texts[0], said) <= OTHERS_MAX, said


async def num_other_tokens(live: Live, text: str, said: str) -> int:
    """Tokens of an answer that the engine alone, at the same place, would not choose.

    An engine that had to forget computes what a running request has said anew, all at once, which
    may round otherwise; from a wrong cache nearly every token comes out another.
    """
    count = place = 0
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    while place < len(said) and count <= OTHERS_MAX:
        body = {
            "model": live.model,
            "prompt": prompt + said[:place],
            "max_tokens": len(said) - place,
            "temperature": 0,
            "cache_salt": f"alone {place} {said}",
        }
        url = f"{live.topology.engines['pd-engine']}/v1/completions"
        async with live.http.post(url, json=body) as reply:
            rest = (await reply.json())["choices"][0]["text"]
        same = (one == other for one, other in zip(rest, said[place:], strict=False))
        place += sum(takewhile(bool, same))
        count += place < len(said)
        place += 1
    return count
