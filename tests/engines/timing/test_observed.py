"""Routing without a plan, over real sockets: a crowd uses the engines of both clusters."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from prfaas.core.routing.observed import PACE

from .deployment import LONG, SHORT, World, running
from .worlds import MODEL

pytestmark = pytest.mark.timeout(180)
CROWD = 16


async def stream(world: World, prompt: list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True}
    async with world.http.post(f"{world.url}/v1/completions", json=body) as reply:
        assert reply.status == 200
        assert (await reply.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("policy", ["observed", "paper"])
async def test_a_crowd_uses_both_clusters_once_first_tokens_were_seen(
    checkpoint: Path, identities: Path, tmp_path: Path, policy: str
) -> None:
    """0.3 s away and 0.6 s at home: sixteen prompts wait for five seconds if all are sent away."""
    routing = {"offload_threshold": 200, "policy": policy}
    async with running(tmp_path, checkpoint, identities, 1.0, routing=routing) as world:
        for number in range(PACE.num_min):
            await stream(world, [number, *SHORT])
            await stream(world, [number, *LONG])
        # The remote path is the faster one, and nobody waits.
        assert (await reasons(world, 2 * PACE.num_min))["above_threshold"] == PACE.num_min
        await asyncio.gather(*(stream(world, [100 + n, *LONG]) for n in range(CROWD)))
        found = await reasons(world, CROWD)
    if policy == "paper":
        assert found == {"above_threshold": CROWD}
        return
    assert found.keys() == {"above_threshold", "faster_local"}
    assert found["faster_local"] >= 2


async def reasons(world: World, count: int) -> Counter[str]:
    """Of the last requests."""
    async with world.http.get(f"{world.url}/control/requests?limit={count}") as reply:
        return Counter(record["reason"] for record in (await reply.json())["requests"])
