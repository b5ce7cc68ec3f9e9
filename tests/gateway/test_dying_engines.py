"""Engines that die while prompts are tokenised: their requests get 503 or another engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import World, until
from .prompts import LONG, SHORT

BODIES = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SHORT}]},
    "/tokenize": {"prompt": SHORT},
}


@pytest.fixture
def tokenising(world: World, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Hold every prompt once its tokens are there, until the engine that decodes is down."""
    begun, prompts = asyncio.Event(), world.gateway._prompts
    tokenise = prompts.prompt

    async def held(*args: Any, **more: Any) -> Any:
        made = await tokenise(*args, **more)
        begun.set()
        await until(lambda: not world.gateway.engines.by_name["decode"].is_ready)
        return made

    monkeypatch.setattr(prompts, "prompt", held)
    return begun


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompts_being_tokenised_while_the_last_engine_dies_get_503(
    world: World, tokenising: asyncio.Event, path: str
) -> None:
    posts = [asyncio.create_task(world.post(BODIES[path], path)) for _ in range(10)]
    await tokenising.wait()
    world.decode.healthy = False
    answers = await asyncio.gather(*posts)
    assert {status for status, _ in answers} == {503}
    assert {answer["error"]["type"] for _, answer in answers} == {"ServiceUnavailableError"}
    assert len(world.gateway.driver.dispatcher.requests) == 0


async def test_a_prompt_being_tokenised_while_its_engine_dies_goes_to_another(
    world: World, tokenising: asyncio.Event
) -> None:
    world.spare.healthy = True
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    post = asyncio.create_task(world.post(BODIES["/v1/completions"]))
    await tokenising.wait()
    world.decode.healthy = False
    assert (await post)[0] == 200
    assert len(world.spare.calls) == 1


async def test_tokenize_reports_the_length_that_it_checked_against(
    world: World, tokenising: asyncio.Event
) -> None:
    post = asyncio.create_task(world.post(BODIES["/tokenize"], "/tokenize"))
    await tokenising.wait()
    world.decode.healthy = False
    status, answer = await post
    assert (status, answer["max_model_len"]) == (200, 4096)
