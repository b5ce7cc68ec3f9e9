"""Two tenants with one prompt, over real pool nodes and engines: what is whose, and what shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest

from prfaas.core.kv.blocks import BlockKey, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.pool.sites import until

from .deployment import LONG, World, running

KEYS = {"red": new_key(), "blue": new_key()}
TENANTS = {name: {"keys": [key_hash(key)]} for name, key in KEYS.items()}
WHOLE = 288
"""Of 300 tokens, what whole blocks hold."""


def layout_of(world: World) -> Layout:
    layout = world.gateway.pools.layout("pd-pool", "pd-0")
    assert layout is not None
    return layout


def hashes_of(world: World, name: str) -> list[bytes]:
    layout, tenant = layout_of(world), world.gateway.tenants.by_name[name]
    return hash_chain(
        LONG,
        tokens_per_hash=layout.tokens_per_hash,
        seed=layout.hash_seed,
        cache_salt=tenant.cache_salt,
    )


def in_index(world: World, pool: str, name: str) -> int:
    index, layout = world.gateway.index, layout_of(world)
    return index.usable_hit(pool, layout, hashes_of(world, name), len(LONG))


def in_pool(world: World, pool: str, name: str) -> list[BlockKey]:
    theirs = set(hashes_of(world, name))
    return [key for key in world.sites[pool].held() if key.block_hash in theirs]


def in_engines(world: World, name: str) -> dict[str, int]:
    layout = layout_of(world)
    step = layout.boundary_tokens // layout.tokens_per_hash
    ends = hashes_of(world, name)[step - 1 :: step]
    return {i.name: i.cache.held_tokens(ends, WHOLE) for i in world.instances}


async def test_one_tenants_blocks_are_no_hit_of_another(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(tmp_path, checkpoint, identities, tenants=TENANTS) as world:
        first = await world.complete(LONG, KEYS["red"])
        pools = ("prfaas-pool", "pd-pool")
        await until(lambda: [in_index(world, pool, "red") for pool in pools] == [WHOLE, WHOLE])
        assert set(in_engines(world, "red").values()) == {0, WHOLE}
        for pool in pools:
            assert in_pool(world, pool, "red")
            assert in_index(world, pool, "blue") == 0
            assert in_pool(world, pool, "blue") == []
        assert set(in_engines(world, "blue").values()) == {0}

        second = await world.complete(LONG, KEYS["blue"])
        record = await world.record()
        assert (record["tenant"], record["path"]) == ("blue", "remote")
        assert record["pd_hit_tokens"] == record["prfaas_hit_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert world.instance("prfaas-0").counts.hit_tokens == 0
        # The answer follows from the tokens alone.
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        await until(lambda: [in_index(world, pool, "blue") for pool in pools] == [WHOLE, WHOLE])
        for pool in pools:
            assert len(in_pool(world, pool, "blue")) == len(in_pool(world, pool, "red"))

        again = await world.complete(LONG, KEYS["red"])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE


async def test_a_run_shows_no_key_no_prompt_and_no_salt(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("DEBUG")
    prompt = "sesame open " * 30
    async with running(tmp_path, checkpoint, identities, tenants=TENANTS) as world:
        salts = [tenant.cache_salt for tenant in world.gateway.tenants.by_name.values()]
        for key in KEYS.values():
            reply = await world.complete(prompt, key)
            assert reply["usage"]["prompt_tokens"] > 200
        assert (await world.record())["path"] == "remote"
        shown = await pages(world)
    shown += caplog.text + "".join(capfd.readouterr())
    # What was looked through is there.
    for expected in ("prfaas_tenant_tokens_total", "request ", "prfaas_pool_", "vllm:"):
        assert expected in shown
    for secret in (*KEYS.values(), *salts, "sesame", *[h["keys"][0][7:] for h in TENANTS.values()]):
        assert secret not in shown


async def pages(world: World) -> str:
    """All that operators can look at."""
    engines = [engine.url for engine in world.gateway.engines.by_name.values()]
    urls = [f"{base}/metrics" for base in (world.url, *engines)]
    urls += [f"{world.url}/control/{page}" for page in ("requests", "links", "decisions")]
    urls += [f"{world.url}/console/api/state", f"{world.url}/health?full=1"]
    registries = [site.node.metrics.registry for site in world.sites.values()]
    text = "".join(generate_latest(registry).decode() for registry in registries)
    for url in urls:
        async with world.http.get(url) as reply:
            assert reply.status == 200, url
            text += await reply.text()
    return text
