"""Data-parallel ranks behind one URL: the gateway chooses the rank, by what each holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from .deployment import LONG, PD_ENGINES, World, alone, running

pytestmark = pytest.mark.timeout(240)
NUM_PROMPTS = 6


def prompt(number: int) -> list[int]:
    """Prompts without a common prefix, too short to be offloaded."""
    return [(number * 31 + place * 7) % 250 for place in range(112)]


@pytest.fixture
async def world(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    events = {
        name: (f"ipc://{tmp_path}/{name}.e", f"ipc://{tmp_path}/{name}.r") for name in PD_ENGINES
    }
    async with running(tmp_path, checkpoint, identities, kv_events=events, has_ranks=True) as found:
        yield found


def computed(world: World) -> list[int]:
    return [world.instance(name).counts.prompt_tokens for name in PD_ENGINES]


async def serve(world: World, tokens: list[int]) -> str:
    """Name of the rank that a request was routed to, which has to be the one that served it."""
    before = computed(world)
    await world.complete(tokens)
    after = computed(world)
    served = [name for name, a, b in zip(PD_ENGINES, before, after, strict=True) if a != b]
    name = str((await world.record())["decode_engine"])
    assert served == [name]
    return name


async def held(world: World, tokens: list[int]) -> dict[str, int]:
    """Tokens of a prompt in the device memory of each rank, as the gateway's index has them."""
    async with world.http.post(f"{world.url}/kv/lookup", json={"prompt": tokens}) as reply:
        clusters = (await reply.json())["clusters"]
    [engines] = [found["engines"] for found in clusters if found["cluster"] == "pd"]
    return {engine["name"]: engine["hit_tokens"] for engine in engines}


async def test_a_rank_serves_what_was_routed_to_it_and_its_events_are_its_own(
    world: World,
) -> None:
    urls = {world.gateway.engines.by_name[name].url for name in PD_ENGINES}
    assert len(urls) == 1
    for number in range(NUM_PROMPTS):
        name = await serve(world, prompt(number))
        [other] = set(PD_ENGINES) - {name}
        found = await held(world, prompt(number))
        while not found[name]:
            found = await held(world, prompt(number))
        assert found[other] == 0


async def test_ranks_share_concurrent_requests(world: World) -> None:
    await asyncio.gather(*(world.complete(prompt(number)) for number in range(8)))
    assert all(computed(world))


async def test_a_prompt_is_handed_over_to_a_rank(
    world: World, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    assert await world.text(LONG) == await alone(checkpoint, tmp_path / "alone", LONG)
    record = await world.record()
    assert record["path"] == "remote"
    assert world.instance(record["decode_engine"]).counts.external_hit_tokens > 0


async def test_a_rank_that_is_not_there_is_refused_and_metrics_are_by_rank(world: World) -> None:
    url = world.gateway.engines.by_name[PD_ENGINES[0]].url
    async with aiohttp.ClientSession() as http:
        for text, status in (("1", 200), ("2", 400), ("-1", 400), ("x", 400)):
            body = {"prompt": prompt(1), "max_tokens": 1}
            headers = {"X-data-parallel-rank": text}
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == status
        async with http.get(f"{url}/metrics") as reply:
            metrics = await reply.text()
    for rank in range(2):
        assert f'vllm:num_requests_waiting{{engine="{rank}",' in metrics
    assert metrics.count("# TYPE vllm:num_requests_waiting ") == 1
    assert computed(world)[0] == 0
