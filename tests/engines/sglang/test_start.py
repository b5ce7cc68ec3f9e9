"""The start of the backend: what it announces, and what it refuses in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.core.kv.blocks import GroupKind, HashScheme, differences
from prfaas.engines.sglang import facts
from prfaas.engines.timing.profile import load_profile
from prfaas.errors import ConfigError
from prfaas.pool.engine.engine_server import EngineSession
from prfaas.wire.messages.engine import EngineHello
from tests.engines.sglang import names
from tests.engines.sglang.conftest import Engines, PoolThread
from tests.engines.sglang.host_pools import HostPool
from tests.engines.sglang.pages import HASHES, kept
from tests.plans import plan_file


def hellos(node: PoolThread) -> dict[str, EngineHello]:
    """Hellos of engines, by name."""

    async def read() -> list[EngineSession]:
        return list(node.site.node.engine_room.port._sessions)

    return {each.name: each.hello for each in node.run(read())}


def test_an_engine_announces_its_pages_and_their_scheme(
    engines: Engines, pool_node: PoolThread
) -> None:
    engines.start()
    hello = hellos(pool_node)["decode"]
    layout = hello.layout.layout()
    (group,) = layout.groups
    assert layout.hash_scheme is HashScheme.SGLANG_PAGES
    assert hello.facts["hash_scheme"] == "sglang_pages"
    assert hello.facts["engine"] == f"sglang {facts.VERSIONS[0]}"
    assert (layout.tokens_per_hash, group.kind) == (16, GroupKind.FULL_ATTENTION)
    assert group.block_bytes == 2 * 96
    assert group.planes == (("bfloat16", 192),)
    assert hello.model == "tiny"


CHANGES: dict[str, Any] = {
    "exec.attention_backend": lambda context: context.bags["exec"].put("attention_backend", "x"),
    "nested": lambda context: context.bags["exec"]._subs["moe"].put("moe_runner_backend", "x"),
    "model.dtype": lambda context: context.bags["model"].put("dtype", "float16"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_that_may_change_pages_changes_the_layout(
    change: str, engines: Engines, pool_node: PoolThread, context: names.Context
) -> None:
    engine = engines.start(prfaas_engine="one")
    kept(engine)
    CHANGES[change](context)
    other = engines.start(prfaas_engine="two")
    found = hellos(pool_node)
    assert found["one"].layout.layout_id != found["two"].layout.layout_id
    assert len(differences(found["one"].facts, found["two"].facts)) == 1
    assert (engine.batch_exists(HASHES), other.batch_exists(HASHES)) == (4, 0)


def test_a_byte_of_the_weights_changes_the_layout(
    engines: Engines, pool_node: PoolThread, checkpoint: Path
) -> None:
    engines.start(prfaas_engine="one")
    (checkpoint / "model.safetensors").write_bytes(b"Weights")
    engines.start(prfaas_engine="two")
    found = hellos(pool_node)
    named = differences(found["one"].facts, found["two"].facts)
    assert [each.fact for each in named] == ["model.weights"]


def test_a_setting_of_one_engine_alone_changes_no_layout(
    engines: Engines, pool_node: PoolThread, context: names.Context
) -> None:
    kept(engines.start(prfaas_engine="one"))
    graph = names.Bag(cuda_graph_max_bs_decode=7)
    context.bags["exec"]._subs |= {"graph": graph, "features": names.Bag(watermark_key="secret")}
    other = engines.start(prfaas_engine="two")
    assert other.batch_exists(HASHES) == 4


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"layout": "page_head"}, "pool.kv.layout"),
        ({"page_size": 32}, "pool.kv.page_tokens"),
        ({"num_parts": 8, "layout": "layer_first"}, "pool.kv.layout"),
    ],
)
def test_pages_of_another_order_are_another_layout(
    changes: dict[str, Any], fact: str, engines: Engines, pool_node: PoolThread
) -> None:
    engines.start(prfaas_engine="one")
    engines.start({"kv": HostPool(**changes)}, prfaas_engine="two")
    found = hellos(pool_node)
    assert fact in [each.fact for each in differences(found["one"].facts, found["two"].facts)]
    assert found["one"].layout.layout_id != found["two"].layout.layout_id


@pytest.mark.parametrize(("num_parts", "layout"), [(1, "page_first"), (8, "layer_first")])
def test_pages_in_one_or_many_parts_come_back_as_they_were(
    num_parts: int, layout: str, engines: Engines, pool_node: PoolThread
) -> None:
    engine = engines.start({"kv": HostPool(num_parts=num_parts, layout=layout)})
    made, pool = kept(engine), engine.pools["kv"]
    places = [30, 39, 7, 21]
    assert engine.batch_get_v1(HASHES[:4], pool.indices(places)) == [True] * 4
    assert [pool.page(page) for page in places] == made


def test_a_page_is_usable_where_every_rank_has_its_part(
    engines: Engines, pool_node: PoolThread
) -> None:
    ranks = [engines.start(config={"tp_rank": rank, "tp_size": 2}) for rank in range(2)]
    found = hellos(pool_node)
    assert set(found) == {"decode", "decode.tp1"}
    assert found["decode"].layout == found["decode.tp1"].layout
    assert len(found["decode"].layout.groups) == 2
    kept(ranks[0])
    assert [each.batch_exists(HASHES) for each in ranks] == [4, 0]
    pool = ranks[1].pools["kv"]
    data = pool.fill(3, "heads of rank 1")
    assert ranks[1].batch_set_v1(HASHES[:1], pool.indices([3])) == [True]
    assert ranks[1].batch_get_v1(HASHES[:1], pool.indices([5])) == [True]
    assert pool.page(5) == data
    assert ranks[0].batch_exists(HASHES) == 4


def test_ranks_on_several_hosts_are_refused_in_words(
    engines: Engines, pool_node: PoolThread, context: names.Context
) -> None:
    context.bags["parallel"] = names.Bag(nnodes=1, tp_size=16)
    engines.start(config={"tp_rank": 0, "tp_size": 16}, prfaas_engine="one")
    context.bags["parallel"].put("nnodes", 2)
    with pytest.raises(ConfigError, match="--nnodes 2: each rank hands its part of a page to"):
        engines.start(config={"tp_rank": 0, "tp_size": 16}, prfaas_engine="two")


def test_latent_pages_are_the_same_for_all_ranks(engines: Engines, pool_node: PoolThread) -> None:
    pools = [{"kv": HostPool(num_parts=1)} for _ in range(2)]
    ranks = [
        engines.start(each, {"tp_rank": rank, "tp_size": 2, "is_mla_model": True})
        for rank, each in enumerate(pools)
    ]
    kept(ranks[0])
    assert [each.batch_exists(HASHES) for each in ranks] == [4, 4]


def test_two_schemes_share_no_layout(
    engines: Engines, pool_node: PoolThread, tmp_path: Path
) -> None:
    engines.start()
    plan = plan_file(tmp_path)
    sglang = hellos(pool_node)["decode"]
    profile = load_profile(plan, None, "timing", block_tokens=16, bytes_scale=1e-4)
    assert profile.layout.hash_scheme is HashScheme.SHA256_CBOR
    assert profile.layout.layout_id != sglang.layout.layout_id
    assert "hash_scheme" in [each.fact for each in differences(profile.facts, sglang.facts)]


# Refusals


@pytest.mark.parametrize("pool", ["mamba", "swa", "indexer", "draft"])
def test_a_model_with_more_than_full_attention_is_refused(engines: Engines, pool: str) -> None:
    with pytest.raises(ConfigError, match=rf"{pool} besides.*sglang/issues/39830"):
        engines.start({"kv": HostPool(), pool: HostPool()}, waits=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pp_size": 2}, "--pp-size is 2; the pool node needs 1"),
        ({"attn_cp_size": 2}, "--attn-cp-size is 2"),
        ({"dp_rank": 1}, "data-parallel rank is 1; the pool node needs 0"),
        ({"should_split_heads": True}, "tp_lcm_size splits pages"),
    ],
)
def test_ranks_without_names_for_their_parts_are_refused(
    engines: Engines, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engines.start(config=config, waits=False)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"prfaas_pool": ""}, "prfaas_pool"),
        ({"prfaas_engine": None}, "prfaas_engine"),
        ({"prfaas_wait_s": 0}, "prfaas_wait_s"),
        ({"prfaas_wait_s": 61}, "prfaas_wait_s"),
        ({"prfaas_wait": 1}, "there is no prfaas_wait; there are prfaas_pool"),
        ({"interface_v1": 0}, 'add "interface_v1": 1'),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    engines: Engines, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engines.start(waits=False, **extra)


def test_memory_that_is_not_shared_is_refused(engines: Engines) -> None:
    pool = HostPool()
    pool.fd = None
    with pytest.raises(ConfigError, match='add "allocator": "shm"'):
        engines.start({"kv": pool}, waits=False)


def test_pages_at_unequal_distances_are_refused(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, at = HostPool(), HostPool.get_page_buffer_meta

    def odd(self: HostPool, indices: Any) -> tuple[list[int], list[int]]:
        pointers, sizes = at(self, indices)
        return [pointers[0], pointers[1] + 8 * int(indices[0])], sizes

    monkeypatch.setattr(HostPool, "get_page_buffer_meta", odd)
    with pytest.raises(ConfigError, match=r"not at equal distances.*page_first_direct"):
        engines.start({"kv": pool}, waits=False)


@pytest.mark.parametrize(
    ("bag", "name", "value", "words"),
    [
        ("spec", "speculative_algorithm", "EAGLE", r"speculative decoding \(EAGLE\)"),
        ("lora", "enable_lora", True, "without LoRA"),
        ("model", "load_format", "remote_instance", "--load-format remote_instance"),
        ("model", "custom_weight_loader", ["a.b"], "a loader of your own"),
        ("lora", "lora_paths", ["a"], "without LoRA"),
    ],
)
def test_features_that_names_do_not_cover_are_refused(
    engines: Engines, context: names.Context, bag: str, name: str, value: object, words: str
) -> None:
    context.bags[bag].put(name, value)
    with pytest.raises(ConfigError, match=words):
        engines.start(waits=False)


def test_an_unknown_release_is_refused(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "metadata", SimpleNamespace(version=lambda _: "0.5.24"))
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.24 is installed; prfaas knows"):
        engines.start(waits=False)


def test_a_pool_that_comes_late_is_refused(engines: Engines) -> None:
    engine = engines.start(waits=False, prfaas_unproven_pools=True)
    late = HostPool()
    with pytest.raises(ConfigError, match="after the layout was announced"):
        engine.register_mem_host_pool_v2(late, "mamba")
    late.close()


def test_a_model_that_is_not_on_this_machine_is_refused(
    engines: Engines, context: names.Context
) -> None:
    context.bags["model"].put("model_path", "org/not-here")
    with pytest.raises(ConfigError, match="cannot be tied to files"):
        engines.start(waits=False)
