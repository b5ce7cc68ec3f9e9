"""SGLang-like engines at both sites: pages by SGLang's names, and a hand-off without orders.

Pool nodes, links with mutual TLS and the gateway are real; engines compute nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.blocks import HashScheme
from prfaas.core.kv.naming.page_chain import page_chain
from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.engines.timing.profile import load_profile
from prfaas.errors import ConfigError
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from tests.pool.sites import until

from .deployment import LONG, PD_ENGINES, SHORT, World, alone, running
from .worlds import DENSE_PLAN, MODEL, PLAN, SPAN, write_plan

pytestmark = pytest.mark.timeout(120)
SGLANG, VLLM = HashScheme.SGLANG_PAGES, HashScheme.SHA256_CBOR
ALL_SGLANG = dict.fromkeys(("prfaas-0", *PD_ENGINES), SGLANG)
PAGE_BYTES = SPAN * 64
SHIPPED = (len(LONG) - 1) // SPAN
"""Pages of the long prompt that decode can use."""
SLOW_BITS_PER_S = 20_000


@asynccontextmanager
async def pages(
    checkpoint: Path,
    identities: Path,
    directory: Path,
    schemes: Mapping[str, HashScheme] = ALL_SGLANG,
    **more: Any,
) -> AsyncIterator[World]:
    async with running(
        directory, checkpoint, identities, plan_text=DENSE_PLAN, schemes=schemes, **more
    ) as world:
        yield world


def names_in(world: World, pool: str) -> set[bytes]:
    return {key.block_hash for key in world.sites[pool].held()}


async def test_pages_are_handed_over_by_sglangs_names(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pages(checkpoint, identities, tmp_path) as world:
        reply = await world.complete(LONG)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert record["transfer_state"] == "committed"
        assert record["kv_bytes"] == SHIPPED * PAGE_BYTES
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, LONG, DENSE_PLAN)
        decode = world.instance(record["decode_engine"])
        assert decode.counts.external_hit_tokens == SHIPPED * SPAN
        assert decode.counts.stained == 0
        salt = salt_of(deployment_secret(tmp_path / "state"), DEFAULT_NAME)
        chain = page_chain(LONG, tokens_per_page=SPAN, cache_salt=salt)
        assert set(chain[:SHIPPED]) <= names_in(world, "pd-pool")
        sent = world.sites["prfaas-pool"].metric(
            "link_bytes_total", peer="pd-pool", direction="sent"
        )
        assert sent == SHIPPED * PAGE_BYTES
        # What came is a hit of the next prompt, and is not shipped again.
        longer = await world.complete([*LONG, *range(50)])
        record = await world.record()
        assert record["path"] == "local"
        assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] >= SHIPPED * SPAN
        assert await world.complete(SHORT)
        await until(world.is_quiet)
        assert all(site.node.store.order.num_leased == 0 for site in world.sites.values())


async def test_pages_travel_while_the_engine_computes(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pages(checkpoint, identities, tmp_path, time_scale=2.0) as world:
        asked = asyncio.create_task(world.complete(LONG))
        prefill, local = world.instance("prfaas-0"), world.sites["pd-pool"]
        await until(lambda: len(local.held()) > 0)
        assert prefill.scheduler.num_running + prefill.num_waiting == 1
        await asked
        assert (await world.record())["fallback"] is None


async def test_lost_pages_are_computed(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    async with pages(checkpoint, identities, tmp_path, has_wire=True) as world:
        world.wire.read_bits_per_s = SLOW_BITS_PER_S
        asked = asyncio.create_task(world.complete(LONG))
        local = world.sites["pd-pool"].node
        await until(lambda: local.inbound.known.num_open == 1)
        await world.sites["prfaas-pool"].kill()
        reply = await asked
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, LONG, DENSE_PLAN)
        assert (await world.record())["fallback"] is not None
        del world.sites["prfaas-pool"]
        await until(world.is_quiet)


async def test_pages_that_are_late_are_computed(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    routing = {"offload_threshold": 200, "transfer_timeout": "1s"}
    async with pages(checkpoint, identities, tmp_path, has_wire=True, routing=routing) as world:
        world.wire.read_bits_per_s = SLOW_BITS_PER_S
        reply = await world.complete(LONG)
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, LONG, DENSE_PLAN)
        record = await world.record()
        assert record["path"] == "remote"
        assert record["fallback"] == {"stage": "transfer", "reason": "timeout"}
        world.wire.read_bits_per_s = 0
        await until(world.is_quiet)


async def test_pages_that_are_never_stored_are_not_waited_for_long(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """The engine has them in its own cache, and stored them before the pool node dropped them."""
    async with pages(checkpoint, identities, tmp_path) as world:
        salt = salt_of(deployment_secret(tmp_path / "state"), DEFAULT_NAME)
        url = world.gateway.engines.by_name["prfaas-0"].url
        body = {"prompt": LONG, "cache_salt": salt, "max_tokens": 1, "temperature": 0}
        async with world.http.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200
        source = world.sites["prfaas-pool"]
        await until(lambda: len(source.held()) >= SHIPPED)
        source.node.store.drop(source.node.store.in_memory()[2:])
        answer = await world.complete(LONG)
        record = await world.record()
        assert record["fallback"] == {"stage": "transfer", "reason": "unknown"}
        assert record["transfer_state"] == "committed"
        assert answer["choices"][0]["text"] == await alone(checkpoint, tmp_path, LONG, DENSE_PLAN)
        assert world.instance(record["decode_engine"]).counts.external_hit_tokens == 2 * SPAN


@pytest.mark.parametrize("odd", ["prfaas-0", "pd-1"])
async def test_engines_of_two_kinds_share_no_block(
    checkpoint: Path, identities: Path, tmp_path: Path, odd: str
) -> None:
    """One engine is vLLM-like: at the other site, or beside an SGLang-like one."""
    async with pages(checkpoint, identities, tmp_path, ALL_SGLANG | {odd: VLLM}) as world:
        expected = await alone(checkpoint, tmp_path, LONG, DENSE_PLAN)
        assert await world.text(LONG) == expected
        reason = (await world.record())["reason"]
        found = world.gateway.layouts.mismatches()
        assert [each.engine for each in found] == [odd]
        assert "hash_scheme" in [difference.fact for difference in found[0].found]
        if odd == "prfaas-0":
            assert reason == "layout_mismatch"
        for name in PD_ENGINES:  # Each has the prompt to itself, so that both kinds store it.
            body = {"prompt": LONG, "max_tokens": 12, "temperature": 0}
            url = world.gateway.engines.by_name[name].url
            async with world.http.post(f"{url}/v1/completions", json=body) as reply:
                assert (await reply.json())["choices"][0]["text"] == expected
        local = world.sites["pd-pool"].node.store
        await until(lambda: len({at for at, _ in local.names()}) == (1 if odd == "prfaas-0" else 2))
        await until(world.is_quiet)
        names: dict[bytes, set[bytes]] = {}
        for site in world.sites.values():
            for layout_id, key in site.node.store.names():
                names.setdefault(layout_id, set()).add(key.block_hash)
        assert len(set.union(*names.values())) == sum(map(len, names.values()))
        assert not any(instance.counts.stained for instance in world.instances)


async def test_an_engine_whose_pool_node_is_gone_computes(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with pages(checkpoint, identities, tmp_path) as world:
        await world.sites["pd-pool"].kill()
        assert await world.text(LONG) == await alone(checkpoint, tmp_path, LONG, DENSE_PLAN)
        del world.sites["pd-pool"]


def test_a_model_with_linear_state_is_refused(tmp_path: Path) -> None:
    """As the backend for SGLang refuses it."""
    plan = write_plan(tmp_path, PLAN)
    with pytest.raises(ConfigError, match="linear_state"):
        load_profile(plan, None, MODEL, block_tokens=SPAN, bytes_scale=1.0, hash_scheme=SGLANG)
