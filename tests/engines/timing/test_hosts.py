"""One PD cluster, several hosts: prefill and decode apart, and prefixes of other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.cli.operate.ctl_views import status_lines
from tests.pool.sites import until

from .deployment import World, alone
from .pulled_prefixes import check_nothing_is_held, outcomes
from .site_of_hosts import only, settled, site_of
from .worlds import DENSE_PLAN

pytestmark = pytest.mark.timeout(120)
APART = {"pool-a": {"p": "prefill"}, "pool-b": {"d": "decode"}}
PROMPT = list(range(300))
"""Its blocks reach to 288 tokens."""


async def test_one_host_prefills_and_another_one_decodes(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with site_of(tmp_path, checkpoint, identities, APART) as world:
        text = await world.text(PROMPT)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("local", None)
        assert (record["prefill_engine"], record["decode_engine"]) == ("p", "d")
        assert (record["source_pool"], record["destination_pool"]) == ("pool-a", "pool-b")
        assert (record["transfer_state"], record["kv_bytes"]) == ("committed", 288 * 64 + 4096)
        assert world.instance("p").counts.prompt_tokens == len(PROMPT)
        assert world.instance("d").counts.external_hit_tokens == 288
        assert text == await alone(checkpoint, tmp_path, PROMPT)
        await settled(world)
        check_nothing_is_held(world)


async def test_only_what_the_host_that_decodes_lacks_crosses(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with site_of(tmp_path, checkpoint, identities, APART, plan_text=DENSE_PLAN) as world:
        await world.text(PROMPT[:160])
        await settled(world)
        world.forget()
        text = await world.text(PROMPT)
        record = await world.record()
        assert (record["prefill_engine"], record["decode_engine"]) == ("p", "d")
        assert (record["cached_tokens"], record["kv_bytes"]) == (160, (288 - 144) * 64)
        assert text == await alone(checkpoint, tmp_path, PROMPT)


@pytest.mark.parametrize("host", ["pool-a", "pool-b"])
async def test_a_host_that_dies_costs_only_time(
    checkpoint: Path, identities: Path, tmp_path: Path, host: str
) -> None:
    async with site_of(tmp_path, checkpoint, identities, APART) as world:
        await world.sites.pop(host).kill()
        await until(lambda: not world.gateway.pools.is_live(host))
        text = await world.text(PROMPT)
        assert text == await alone(checkpoint, tmp_path, PROMPT)


async def test_a_link_between_hosts_shows_no_threshold(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with site_of(tmp_path, checkpoint, identities, APART) as world:
        async with world.http.get(f"{world.url}/control/status") as reply:
            status = await reply.json()
        assert [link["offload_threshold"] for link in status["links"]] == [None, None]
        [line] = [line for line in status_lines(status) if "pool-a:pool-b" in line]
        assert "threshold" not in line
        async with world.http.get(f"{world.url}/console/api/state") as reply:
            state = await reply.json()
        links = state["sample"]["links"].values()
        assert [link["offload_threshold"] for link in links] == [None, None]
        async with world.http.get(f"{world.url}/metrics") as reply:
            assert "prfaas_offload_threshold_tokens{" not in await reply.text()
        one = {"tokens": 9, "source": "pool-a", "destination": "pool-b"}
        async with world.http.post(f"{world.url}/control/threshold", json=one) as reply:
            assert reply.status == 409, await reply.text()
        async with world.http.post(f"{world.url}/control/threshold", json={"tokens": 9}) as reply:
            assert await reply.json() == {"decisions": []}


BOTH = {f"pool-{n}": {f"e{n}": "both"} for n in range(3)}


async def computed(world: World, prompt: list[int], engine: str) -> int:
    """Tokens of a prompt that an engine finds cached."""
    only(world, engine)
    reply = await world.complete(prompt)
    assert (await world.record())["decode_engine"] == engine
    cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_a_hit_on_any_host_is_a_hit_on_every_host(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with site_of(tmp_path, checkpoint, identities, BOTH) as world:
        expected = await alone(checkpoint, tmp_path, PROMPT)
        assert await computed(world, PROMPT, "e0") == 0
        await settled(world)
        world.forget()
        for engine in ("e1", "e2"):
            only(world, engine)
            assert await world.text(PROMPT) == expected
            record = await world.record()
            assert (record["decode_engine"], record["fallback"]) == (engine, None)
            assert (record["cached_tokens"], record["pulled_tokens"]) == (288, 288)
            assert record["destination_pool"] == f"pool-{engine[1]}"
            await settled(world)
        assert sum(world.instance(name).counts.external_hit_tokens for name in ("e1", "e2")) == 576
        assert await outcomes(world) == {"whole": 1}
        check_nothing_is_held(world)


MIB = 1 << 20
LARGE_PLAN = DENSE_PLAN.replace('"64B"', '"64KiB"')
"""A block of 16 tokens has a MiB."""


@pytest.mark.timeout(500)
@pytest.mark.parametrize("mib", [5, 10])
async def test_three_pools_of_64_mib_hold_150_mib_and_every_engine_hits_all_of_it(
    checkpoint: Path, identities: Path, tmp_path: Path, mib: int
) -> None:
    """A prompt of 5 MiB fits into the eighth that a pool node keeps free to receive, one of 10 MiB
    does not."""
    num_tokens = 16 * mib
    prompts = [[n, *range(100, 100 + num_tokens)] for n in range(150 // mib)]
    async with site_of(
        tmp_path,
        checkpoint,
        identities,
        BOTH,
        memory_bytes=64 * MIB,
        plan_text=LARGE_PLAN,
        host_memory=40 * MIB,
    ) as world:
        texts = {}
        for n, prompt in enumerate(prompts):
            only(world, f"e{n % 3}")
            texts[n] = await world.text(prompt)
        await settled(world)
        assert sum(site.node.store.room.used_bytes for site in world.sites.values()) >= 150 * MIB
        assert all(site.node.store.room.capacity_bytes == 64 * MIB for site in world.sites.values())
        num_pulled = 0
        for engine in ("e0", "e1", "e2"):
            only(world, engine)
            for n, prompt in enumerate(prompts):
                world.forget()
                reply = await world.complete(prompt)
                record = await world.record()
                assert (record["decode_engine"], record["fallback"]) == (engine, None)
                assert reply["choices"][0]["text"] == texts[n]
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == num_tokens, (engine, n, cached)
                num_pulled += record["pulled_tokens"] or 0
                await settled(world)
        # Two thirds of the prompts lie on other hosts, for every engine.
        assert num_pulled == 2 * len(prompts) * num_tokens
        hits = sum(world.instance(f"e{n}").counts.external_hit_tokens for n in range(3))
        assert hits == 3 * len(prompts) * num_tokens
        check_nothing_is_held(world)
