"""A PD pool that is too small for what the PrfaaS cluster could send: nothing is sent in vain."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from .deployment import LONG, World, running

pytestmark = pytest.mark.timeout(180)
NUM_PROMPTS = 16
PROMPT_BYTES = 18 * 1024 + 4096
"""Eighteen blocks of attention and a state."""


async def outcomes(world: World) -> Counter[tuple[str, str]]:
    """Send prompts at once; their paths and reasons, and that nothing was refused."""
    prompts = [[number, *LONG] for number in range(NUM_PROMPTS)]
    await asyncio.gather(*(world.complete(prompt) for prompt in prompts))
    async with world.http.get(f"{world.url}/control/requests") as reply:
        records = (await reply.json())["requests"]
    assert [record["fallback"] for record in records] == [None] * NUM_PROMPTS
    for site in world.sites.values():
        for end in ("source", "destination"):
            assert site.metric("tickets_refused_total", end=end, reason="no_room") == 0
    assert world.gateway.driver.dispatcher.rooms.taken_bytes == 0
    return Counter((record["path"], record["reason"]) for record in records)


async def test_prompts_that_do_not_fit_are_not_sent_away(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    memory = PROMPT_BYTES
    async with running(tmp_path, checkpoint, identities, pd_memory_bytes=memory) as world:
        assert await outcomes(world) == {("local", "no_room"): NUM_PROMPTS}
        assert world.instance("prfaas-0").counts.prompt_tokens == 0


async def test_as_many_prompts_are_sent_away_as_fit_at_once(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    memory = 3 * PROMPT_BYTES
    async with running(tmp_path, checkpoint, identities, pd_memory_bytes=memory) as world:
        found = await outcomes(world)
        assert found["remote", "above_threshold"] >= 2
        assert found.total() == NUM_PROMPTS
