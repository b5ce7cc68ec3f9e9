"""A lossy class of a tenant over real pool nodes and engines: none of it is lossless again.

The engines here verify the bytes of what they load. What they compute on top of other bytes is
stained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import Layout, Plane
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.pool.sites import until

from .deployment import LONG, World, running

KEYS = {"red": new_key(), "blue": new_key()}
TENANTS: dict[str, dict[str, Any]] = {
    "red": {"keys": [key_hash(KEYS["red"])], "service_tiers": ["cheap"]},
    "blue": {"keys": [key_hash(KEYS["blue"])]},
}
CLASSES = {"cheap": {"quality": "fp8"}}
LONGER = [*LONG, *range(1, 150)]
POOLS = ("prfaas-pool", "pd-pool")


def layout_of(world: World) -> Layout:
    layout = world.gateway.pools.layout("pd-pool", "pd-0")
    assert layout is not None
    return layout


def hashes_of(
    world: World, tokens: list[int], quality: Quality, tenant: str = "red"
) -> list[bytes]:
    layout = layout_of(world)
    return hash_chain(
        tokens,
        tokens_per_hash=layout.tokens_per_hash,
        seed=layout.hash_seed,
        cache_salt=world.gateway.tenants.by_name[tenant].salt_for(None, quality),
    )


def found(world: World, tokens: list[int], quality: Quality) -> list[int]:
    """Blocks of a prompt in a class: in the index, the pools and the engines."""
    layout, hashes = layout_of(world), hashes_of(world, tokens, quality)
    index = [world.gateway.index.usable_hit(p, layout, hashes, len(tokens)) for p in POOLS]
    named = set(hashes)
    pools = [sum(k.block_hash in named for k in world.sites[pool].held()) for pool in POOLS]
    step = layout.boundary_tokens // layout.tokens_per_hash
    engines = [i.cache.held_tokens(hashes[step - 1 :: step], len(tokens)) for i in world.instances]
    return [*index, *pools, *engines]


async def rounds(world: World) -> None:
    """Have the link round the blocks of the engines, whose planes they do not announce."""
    layout = layout_of(world)
    groups = [
        replace(each, planes=(Plane("bfloat16", each.block_bytes),)) for each in layout.groups
    ]
    for site in world.sites.values():
        site.node.link_room.layouts.learn(replace(layout, groups=tuple(groups)))
    coding = world.sites["prfaas-pool"].node.links["pd-pool"].coding
    await until(lambda: coding._may_round)


async def test_a_lossy_block_answers_no_lossless_look_up_in_index_pool_or_engine(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(tmp_path, checkpoint, identities, tenants=TENANTS, classes=CLASSES) as world:
        await rounds(world)
        clean = await world.complete(LONGER, KEYS["blue"])

        lossy = await world.complete(LONG, KEYS["red"], service_tier="cheap")
        record = await world.record()
        assert (record["path"], record["quality"]) == ("remote", "fp8")
        assert lossy["usage"]["kv_quality"] == "fp8"
        sent, wire = (
            world.sites["prfaas-pool"].metric(name, peer="pd-pool", direction="sent")
            for name in ("link_bytes_total", "link_wire_bytes_total")
        )
        assert wire < sent
        # Computed on top of it, in the same class: the prefix is found, and what follows is
        # stained.
        above = await world.complete(LONGER, KEYS["red"], service_tier="cheap")
        assert above["usage"]["prompt_tokens_details"]["cached_tokens"] >= 272
        assert above["choices"][0]["text"] != clean["choices"][0]["text"]
        await until(lambda: any(found(world, LONGER, Quality.FP8)))

        assert not any(found(world, LONGER, Quality.LOSSLESS))
        exact = await world.complete(LONGER, KEYS["red"])

        record = await world.record()
        assert record["quality"] == "lossless"
        assert record["pd_hit_tokens"] == record["prfaas_hit_tokens"] == 0
        assert exact["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "kv_quality" not in exact["usage"]
        assert exact["choices"][0]["text"] == clean["choices"][0]["text"]


async def test_a_class_without_a_quality_has_that_of_its_tenant(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tenants = {"red": TENANTS["red"] | {"quality": "kivi4", "service_tiers": ["cheap", "plain"]}}
    classes = CLASSES | {"plain": {}, "best": {"quality": "lossless"}}
    tenants["red"]["service_tiers"] = ["cheap", "plain", "best"]
    async with running(tmp_path, checkpoint, identities, tenants=tenants, classes=classes) as world:
        for tier, quality in (
            (None, "kivi4"),
            ("plain", "kivi4"),
            ("cheap", "fp8"),
            ("best", "lossless"),
        ):
            body: dict[str, Any] = {} if tier is None else {"service_tier": tier}
            await world.complete(LONG, KEYS["red"], **body)
            record = await world.record()
            assert record["quality"] == quality
            async with world.http.get(
                f"{world.url}/control/requests/{record['request_id']}/explanation"
            ) as answer:
                assert (await answer.json())["quality"] == quality
        async with world.http.get(f"{world.url}/metrics") as answer:
            shown = await answer.text()
        for line in ('quality="kivi4",tenant="red"} 2.0', 'quality="fp8",tenant="red"} 1.0'):
            assert f"prfaas_tenant_lossy_requests_total{{{line}" in shown
