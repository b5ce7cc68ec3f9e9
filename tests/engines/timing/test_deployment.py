"""Timing engines in two clusters, with pool nodes, a link and a gateway: all of it real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.timing.deployment import LONG, PD_ENGINES, SHORT, World, alone, running
from tests.pool.sites import Site, until

from .worlds import SPAN

pytestmark = pytest.mark.timeout(180)


async def test_both_paths_give_the_same_answer(
    world: World, checkpoint: Path, tmp_path: Path
) -> None:
    for prompt, path in ((LONG, "remote"), (SHORT, "local")):
        reply = await world.complete(prompt)
        record = await world.record()
        assert (record["path"], record["fallback"]) == (path, None)
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, prompt)
    decoded_by = next(i for i in world.instances if i.name in PD_ENGINES and i.counts.steps)
    assert decoded_by.counts.external_hit_tokens == 288
    assert world.instance("prfaas-0").counts.prompt_tokens == len(LONG)


async def test_one_engine_hands_over_to_another_of_its_pool(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    roles = {"pd-0": "prefill", "pd-1": "decode"}
    async with running(tmp_path, checkpoint, identities, roles=roles) as world:
        prefills, decodes = map(world.instance, PD_ENGINES)
        reply = await world.complete(SHORT)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("local", None)
        assert (record["prefill_engine"], record["decode_engine"]) == PD_ENGINES
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, SHORT)
        assert prefills.counts.prompt_tokens == len(SHORT)
        assert decodes.counts.external_hit_tokens == 96
        await world.complete(LONG)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert record["decode_engine"] == "pd-1"
        assert prefills.counts.prompt_tokens == len(SHORT)


async def test_cached_tokens_are_those_of_who_prefilled(world: World) -> None:
    async def cached(prompt: list[int]) -> int:
        details = (await world.complete(prompt))["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    # The remote prefill had nothing, though decode found all of it a moment later.
    assert await cached(LONG) == 0
    await until_hit(world, LONG, 288)
    assert await cached(LONG) == 288
    assert (await world.record())["path"] == "local"
    # Another instance of the cluster has it from the pool node.
    world.forget()
    assert await cached(LONG + [1] * 40) == 288


async def until_hit(world: World, prompt: list[int], num_tokens: int) -> None:
    """Wait until the gateway has heard what the PD pool holds."""
    while (await world.record())["pd_hit_tokens"] != num_tokens:
        await world.complete(prompt)


async def test_a_wrong_block_shows_as_a_wrong_answer(
    world: World,
) -> None:
    right = await world.text(LONG)
    world.forget()
    await until(world.is_quiet)
    write_wrong(world.sites["pd-pool"], lambda group: group == 1)
    wrong = await world.text(LONG)
    assert wrong != right
    assert sum(instance.counts.stained for instance in world.instances) == 1
    # What follows from it is wrong as well, on whatever engine.
    assert await world.text(LONG) == wrong


def write_wrong(site: Site, chosen: Callable[[int], bool]) -> None:
    """Change a byte of stored blocks behind the back of their digests."""
    for name in list(site.node.store.names()):
        block = site.node.store.get(*name)
        if block is not None and chosen(name[1].group):
            block.data[0] ^= 1


async def test_who_leaves_frees_slots_rows_and_transfers(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(tmp_path, checkpoint, identities, time_scale=0.5) as world:
        prompts = [[n] * 300 for n in range(1, 4)] + [[n] * 100 for n in range(1, 4)]
        asked = [asyncio.create_task(world.complete(prompt, max_tokens=1000)) for prompt in prompts]
        await until(lambda: world.instance("prfaas-0").counts.prompt_tokens)
        await until(lambda: any(world.instance(n).counts.prompt_tokens for n in PD_ENGINES))
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(world.is_quiet)
        assert all(instance.scheduler.kv_used_bytes == 0 for instance in world.instances)


async def test_without_its_pool_node_an_engine_computes_everything(world: World) -> None:
    right = await world.text(SHORT)
    world.forget()
    await world.sites["pd-pool"].kill()
    tiers = [world.instance(name).tier for name in PD_ENGINES]
    await until(lambda: not any(tier is None or tier.is_connected for tier in tiers))
    assert await world.text(SHORT) == right
    del world.sites["pd-pool"]


async def test_a_conversation_stays_with_the_engine_that_has_it(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    places = {n: (f"ipc://{tmp_path}/{n}.e", f"ipc://{tmp_path}/{n}.r") for n in PD_ENGINES}
    async with running(tmp_path, checkpoint, identities, kv_events=places) as world:
        takers, prompt = [], list(SHORT)
        for turn in range(4):
            await world.complete(prompt, max_tokens=1)
            record = await world.record()
            assert record["path"] == "local"
            takers.append(str(record["decode_engine"]))
            hits = await heard_of(world, prompt, takers[0])
            assert hits == (hits[0], hits[0], 0)
            prompt += [200 + turn] * 40
        # It has nothing to load, though its pool has everything, and the other is as idle.
        counts = world.instance(takers[0]).counts
        assert takers == [takers[0]] * 4
        assert (counts.hit_tokens, counts.external_hit_tokens) == (96 + 128 + 176, 0)
        [other] = set(PD_ENGINES) - {takers[0]}
        assert world.instance(other).counts.prompt_tokens == 0


async def heard_of(world: World, prompt: list[int], taker: str) -> tuple[int, int, int]:
    """Tokens of a prompt at the pool and both engines, once the gateway knows that two have it."""
    length = (len(prompt) - 1) // SPAN * SPAN
    [other] = set(PD_ENGINES) - {taker}
    while True:
        async with world.http.post(f"{world.url}/kv/lookup", json={"prompt": prompt}) as reply:
            local = (await reply.json())["clusters"][1]
        hits = {each["name"]: each["hit_tokens"] for each in (*local["pools"], *local["engines"])}
        if hits["pd-pool"] == length and length in (hits[taker], hits[other]):
            return hits["pd-pool"], hits[taker], hits[other]


async def held_remote(world: World, prompt: list[int]) -> int:
    """Tokens of a prompt that the gateway knows the engine of the PrfaaS cluster to hold."""
    async with world.http.post(f"{world.url}/kv/lookup", json={"prompt": prompt}) as reply:
        remote = (await reply.json())["clusters"][0]
    return max(int(engine["hit_tokens"]) for engine in remote["engines"])


async def test_what_only_an_engine_away_holds_is_handed_over_all_the_same(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    places = {"prfaas-0": (f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")}
    async with running(tmp_path, checkpoint, identities, kv_events=places) as world:
        await world.complete(LONG)
        await until(world.is_quiet)
        for name in PD_ENGINES:
            world.instance(name).cache.clear()
        for site in world.sites.values():
            for block in list(site.node.store.names()):
                site.node.store.discard(*block)
        index = world.gateway.index
        await until(lambda: not index.num_blocks("pd-pool") + index.num_blocks("prfaas-pool"))
        prompt = LONG + [7] * 40
        while await held_remote(world, prompt) < 288:
            pass
        reply = await world.complete(prompt)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert (record["pd_hit_tokens"], record["prfaas_hit_tokens"]) == (0, 288)
        assert world.instance("prfaas-0").counts.hit_tokens == 288
        # Nothing is left to compute where it is decoded.
        found = sum(world.instance(name).counts.external_hit_tokens for name in PD_ENGINES)
        assert found == 288 + 336
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, prompt)
