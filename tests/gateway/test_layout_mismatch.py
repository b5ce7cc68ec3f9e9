"""Engines whose blocks differ: served locally, and every surface names the fact and both values."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from click.testing import CliRunner

from prfaas.cli.operate.ctl_command import ctl
from prfaas.core.kv.blocks import UNKNOWN, Facts, facts_id
from prfaas.wire.messages.layouts import LayoutFacts

from .conftest import LAYOUT, World, until
from .prompts import LONG

FACTS = {"model.weights": "aa", "group.0.dtypes": "float32", "block_tokens": "384"}
WORDS = "group.0.dtypes: float32 at decode, float16 at prefill"


async def announce(world: World, ours: Facts, theirs: Facts, theirs_at: str = "prefill") -> None:
    """Engines of both sites, with layouts made of these facts; no facts are an older prfaas."""
    world.spare.healthy = True
    sites = (
        (world.pd_pool, {"decode": ours, "spare": ours}),
        (world.prfaas_pool, {"prefill": theirs if theirs_at == "prefill" else ours}),
    )
    if theirs_at != "prefill":
        sites[0][1][theirs_at] = theirs
    for pool, engines in sites:
        pool.layouts = {
            name: replace(LAYOUT, layout_id=facts_id(facts) if facts else b"O" * 32)
            for name, facts in engines.items()
        }
        pool.facts = [
            LayoutFacts(layout_id=facts_id(facts), facts=dict(facts), model="org/tiny@0123")
            for facts in engines.values()
            if facts
        ]
        pool.tell_state()
    await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
    wanted = pool_ids(world)
    pools = world.gateway.pools
    await until(
        lambda: (
            {
                name: layout.layout_id
                for pool in ("pd-pool", "prfaas-pool")
                for name in ("decode", "spare", "prefill")
                if (layout := pools.layout(pool, name)) is not None
            }
            == wanted
        )
    )


def pool_ids(world: World) -> dict[str, bytes]:
    both = (world.pd_pool.layouts | world.prfaas_pool.layouts).items()
    return {name: layout.layout_id for name, layout in both}


async def health(world: World, query: str = "full=1") -> tuple[int, str]:
    async with world.http.get(f"{world.url}/health?{query}") as reply:
        return reply.status, await reply.text()


async def test_a_mismatch_is_named_with_both_values_wherever_one_looks(world: World) -> None:
    await announce(world, FACTS, FACTS | {"group.0.dtypes": "float16"})
    status, text = await health(world)
    assert status == 503
    assert WORDS in text
    async with world.http.get(f"{world.url}/control/status") as reply:
        [found] = (await reply.json())["layout_mismatches"]
    assert (found["engine"], found["reference"]) == ("prefill", "decode")
    assert found["differences"] == [
        {"fact": "group.0.dtypes", "decode": "float32", "prefill": "float16"}
    ]
    shown = await asyncio.to_thread(CliRunner().invoke, ctl, ["status", "--url", world.url])
    assert f"MISMATCH   prefill, decode  {WORDS}" in shown.output
    assert await world.metric('prfaas_layout_mismatch{engine="prefill"}') == 1
    assert await world.metric('prfaas_layout_mismatch{engine="decode"}') == 0
    async with world.http.get(f"{world.url}/console/api/state") as reply:
        [alarm] = [a for a in (await reply.json())["alarms"] if a["name"] == "layout_mismatch"]
    assert alarm["subject"] == "prefill"
    assert WORDS in alarm["text"]


async def test_requests_are_served_locally_and_their_reason_names_the_fact(world: World) -> None:
    await announce(world, FACTS, FACTS | {"group.0.dtypes": "float16"})
    status, _ = await world.post({"prompt": LONG, "max_tokens": 2})
    assert status == 200
    record = await world.record()
    assert (record["path"], record["reason"]) == ("local", "layout_mismatch")
    assert record["explanation"].endswith(f"KV layouts differ: {WORDS}")
    assert not world.prefill.calls
    shown = await asyncio.to_thread(
        CliRunner().invoke, ctl, ["explain", record["request_id"], "--url", world.url]
    )
    assert WORDS in shown.output


async def test_a_mismatch_that_is_mended_is_over(world: World) -> None:
    await announce(world, FACTS, FACTS | {"block_tokens": "512"})
    assert (await health(world))[0] == 503
    assert (await health(world, "full=parts"))[0] == 200
    assert (await health(world, ""))[0] == 200
    await announce(world, FACTS, FACTS)
    status, text = await health(world)
    assert (status, json.loads(text)) == (200, {"status": "ready"})
    assert await world.metric('prfaas_layout_mismatch{engine="prefill"}') == 0


async def test_a_decode_engine_that_differs_from_its_own_cluster_is_named(world: World) -> None:
    await announce(world, FACTS, FACTS | {"block_tokens": "512"}, theirs_at="spare")
    found = world.gateway.layouts.mismatches()
    assert [each.engine for each in found] == ["spare"]
    assert found[0].words == "block_tokens: 384 at decode, 512 at spare"


async def test_another_model_is_named_with_its_commit(world: World) -> None:
    await announce(world, FACTS, FACTS | {"model.weights": "bb"})
    world.prfaas_pool.facts = [
        LayoutFacts(layout_id=each.layout_id, facts=each.facts, model="org/tiny@beef")
        for each in world.prfaas_pool.facts
    ]
    world.prfaas_pool.tell_state()
    reported = world.gateway.pools.subscription("prfaas-pool")
    await until(lambda: "org/tiny@beef" in {each.model for each in reported.facts.values()})
    [found] = world.gateway.layouts.mismatches()
    assert found.words == (
        "model.weights: aa at decode, bb at prefill (models: org/tiny@0123 and org/tiny@beef)"
    )


async def test_a_peer_without_facts_works_as_far_as_the_ids_go(world: World) -> None:
    """An older pool node or engine: ids are compared, and the words say why no fact is named."""
    await announce(world, {}, {})
    assert (await health(world))[0] == 200
    await announce(world, FACTS, {})
    status, text = await health(world)
    assert status == 503
    assert UNKNOWN in text
    assert await world.metric('prfaas_layout_mismatch{engine="prefill"}') == 1


async def test_facts_are_forgotten_with_their_last_engine(world: World) -> None:
    await announce(world, FACTS, FACTS)
    for number in range(20):
        await announce(world, FACTS, FACTS | {"block_tokens": str(number)})
    subscription = world.gateway.pools._clients["prfaas-pool"].subscription
    assert len(subscription.facts) == 1
