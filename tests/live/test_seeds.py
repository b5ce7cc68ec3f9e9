"""Requests that set how tokens are chosen, with prompts that engines prefill in several steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.live.conftest import Live, document

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]
TEXT = document(5000)
"""Three steps of prefill: an engine takes at most 2,048 tokens a step, and a byte is a token."""
WIDE = {"temperature": 2.0, "logprobs": 1}
FORMS: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True, "max_tokens": 1},
    "n": {"n": 3},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 5, "top_p": 0.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"65": 3, "66": -3}},
    "allowed_token_ids": {"allowed_token_ids": [65, 66, 67]},
    "bad_words": {"bad_words": ["a"]},
    "min_tokens": {"min_tokens": 4, "ignore_eos": True},
    "structured_outputs": {"structured_outputs": {"regex": "[ab]{3,5}"}},
    "response_format": {"response_format": {"type": "json_object"}},
}


async def ask(live: Live, url: str, salt: str = "", **extra: Any) -> list[dict[str, Any]]:
    """The choices of an answer."""
    body = {"model": live.model, "prompt": TEXT, "max_tokens": 12} | WIDE | extra
    if salt:
        body["cache_salt"] = salt
    async with live.http.post(f"{url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        choices: list[dict[str, Any]] = answer["choices"]
        return choices


def tokens(choices: list[dict[str, Any]]) -> list[str]:
    return [token for choice in choices for token in choice["logprobs"]["tokens"]]


async def test_a_seed_chooses_the_same_tokens_in_one_step_of_prefill_and_in_three(
    live: Live,
) -> None:
    """The second request finds all but the end of the prompt in the engine's cache."""
    engine = live.topology.engines["pd-engine"]
    by_seed = {}
    for seed in (1, 2):
        answers = [tokens(await ask(live, engine, f"seed {seed}", seed=seed)) for _ in range(2)]
        assert answers[0] == answers[1]
        by_seed[seed] = answers[0]
    assert by_seed[1] != by_seed[2]


async def test_a_seed_chooses_the_engines_tokens_through_the_gateway(live: Live) -> None:
    """Prefilled remotely, in chunks, and decoded here."""
    engine = live.topology.engines["pd-engine"]
    found = tokens(await ask(live, live.url, seed=5))
    assert found == tokens(await ask(live, engine, "as alone", seed=5))


@pytest.mark.parametrize("form", FORMS)
async def test_no_way_to_choose_tokens_ends_an_engine(live: Live, form: str) -> None:
    """With and without a seed, each with a prompt that is not cached."""
    engine = live.topology.engines["pd-engine"]
    for seed in (None, 3):
        extra = FORMS[form] | ({} if seed is None else {"seed": seed})
        assert await ask(live, engine, f"{form} {seed}", **extra)
    async with live.http.get(f"{engine}/health") as reply:
        assert reply.status == 200
