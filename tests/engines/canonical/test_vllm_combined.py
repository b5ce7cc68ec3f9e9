"""Combined blocks: the bytes, names and limits of engines whose pages are shorter. Needs vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prfaas.config.engines.block_tokens import SETTING
from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.canonical.copies import RankPages, row_runs
from prfaas.core.kv.canonical.parts import block_bytes
from prfaas.core.kv.canonical.pieces import pieces
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.engines.canonical.vllm_parts import (
    BESIDE_VALUES,
    BY_DIMENSION,
    CannotConvertError,
    Division,
    layer_parts,
)
from prfaas.errors import ConfigError
from tests.core.kv.canonical.model_kinds import read
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(240)
TOKENS, HEADS, HEAD_SIZE = 192, 3, 32


def spec(size: int) -> Any:
    cache, torch = needing_vllm("vllm.v1.kv_cache_interface"), needing_vllm("torch")
    return cache.FullAttentionSpec(
        block_size=size, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )


def pages(size: int, values: Any) -> Any:
    """Pages as vLLM's own CPU code writes them."""
    backend = needing_vllm("vllm.v1.attention.backends.cpu_attn")
    ops, torch = needing_vllm("vllm._custom_ops"), needing_vllm("torch")
    code = backend._get_attn_isa(torch.float32, size, HEAD_SIZE)
    if code not in ("vec", "vec16"):
        pytest.skip(f"vLLM's {code} code orders keys so that blocks cannot be combined")
    cache = torch.zeros(TOKENS // size, HEADS, size, 2 * HEAD_SIZE)
    halves = cache.view(TOKENS // size, HEADS, size * 2, HEAD_SIZE)
    slots = torch.arange(TOKENS, dtype=torch.int64)
    keys, rest = values
    ops.cpu_attn_reshape_and_cache(
        keys, rest, halves[:, :, :size], halves[:, :, size:], slots, code
    )
    return cache.numpy().reshape(-1).view(np.uint8)


@pytest.mark.parametrize("size", [32, 48, 64, 96])
def test_pages_of_any_size_are_the_page_of_a_whole_block(size: int) -> None:
    """Keys and values are written by vLLM itself."""
    torch = needing_vllm("torch")
    torch.manual_seed(1)
    values = torch.rand(2, TOKENS, HEADS, HEAD_SIZE).unbind(0)
    num_pages = TOKENS // size
    division = Division(1, HEADS, "LBHNC", num_pages=num_pages, key_order=BY_DIMENSION)
    layers = [layer_parts(spec(size), division)]
    row, page_bytes = pages(size, values), block_bytes(layers) // num_pages
    offsets = [number * page_bytes for number in range(num_pages)]
    found = pieces(row_runs(layers, [RankPages(0, 1, {0: offsets})]), len(row), len(row))
    assert (read(row, found, len(row)) == pages(TOKENS, values)).all()


@pytest.mark.parametrize("order", [BESIDE_VALUES, BY_DIMENSION])
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_pages_of_any_size_announce_one_block(layout: str, order: str) -> None:
    whole = layer_parts(spec(TOKENS), Division(1, HEADS, layout, key_order=order))
    for size in (16, 48, 64):
        division = Division(1, HEADS, layout, num_pages=TOKENS // size, key_order=order)
        assert layer_parts(spec(size), division) == whole


def test_keys_of_unknown_order_are_not_combined() -> None:
    with pytest.raises(CannotConvertError, match=r"blocks of 3 pages cannot be made of .* amx"):
        layer_parts(spec(64), Division(1, HEADS, "LBHNC", num_pages=3, key_order="amx"))
    assert layer_parts(spec(64), Division(1, HEADS, "LBHNC", key_order="amx"))


def engine(tokens: Any, *sizes: int, **changes: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The part of vLLM's configuration that is read, and the connector's settings."""
    extra = {SETTING: tokens, "prfaas_engine": "e"} | changes.pop("extra", {})
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=changes.pop("events", False)),
        cache_config=SimpleNamespace(prefix_match_unit=changes.pop("unit", None)),
    )
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    caches = SimpleNamespace(
        kv_cache_groups=groups, prefix_cacheable_group_ids=tuple(range(len(groups)))
    )
    return config, caches, extra


@pytest.mark.parametrize(
    ("tokens", "sizes", "chunk"),
    [(1088, (272, 272), 4), (1088, (1088,), None), (384, (64,), 6)],
)
def test_a_chunk_has_the_blocks_of_the_length_that_is_set(
    tokens: int, sizes: tuple[int, ...], chunk: int | None
) -> None:
    module = needing_vllm("prfaas.engines.canonical.vllm_ranks")
    config, caches, extra = engine(tokens, *sizes)
    for _ in range(2):
        module.set_chunk(config, caches)
        assert extra.get("blocks_per_chunk") == chunk


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (engine(1056, 272), "blocks of 1056 tokens cannot be made of blocks of 272 at e"),
        (engine(1056, 272), "take 1088, or another --block-size"),
        (engine("768", 384), "prfaas_block_tokens is '768': a number of tokens"),
        (engine(0, 384), "prfaas_block_tokens is 0: a number of tokens"),
        (engine(768, 384, 192), r"blocks of \[192, 384\] tokens; only groups of one size"),
        (engine(768, 384, events=True), "KV events of an engine with blocks of 384 tokens"),
        (engine(768, 384, unit=16), "--prefix-match-unit makes hits within a block"),
        (engine(768, 384, extra={"block_size": 384}), "block_size both set the length of blocks"),
        (engine(768, 384, extra={"blocks_per_chunk": 3}), "both set the length of blocks"),
    ],
)
def test_blocks_that_cannot_be_combined_are_refused_at_start(made: Any, words: str) -> None:
    config, caches, _ = made
    with pytest.raises(ConfigError, match=words):
        needing_vllm("prfaas.engines.canonical.vllm_ranks").set_chunk(config, caches)


def test_windows_are_not_combined() -> None:
    module = needing_vllm("prfaas.engines.canonical.vllm_ranks")
    module.refuse_kinds({GroupKind.SLIDING_WINDOW}, 1)
    module.refuse_kinds({GroupKind.FULL_ATTENTION, GroupKind.LINEAR_STATE}, 4)
    with pytest.raises(ConfigError, match="combines 4 blocks, which is not supported for sliding"):
        module.refuse_kinds({GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW}, 4)


def test_the_scheduler_cuts_prefill_where_shared_blocks_end() -> None:
    module = needing_vllm("prfaas.engines.vllm_layout")
    attention = CacheGroup(0, GroupKind.FULL_ATTENTION, 768, 8)
    state = CacheGroup(1, GroupKind.LINEAR_STATE, 768, 8)
    for groups, size in (((attention,), 384), ((attention, state), 768)):
        config = SimpleNamespace(block_size=384)
        module.cut_at_blocks(config, groups)
        assert config.block_size == size


SPAN = 96
LAYOUT = Layout(b"L" * 32, SPAN, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, SPAN, 8),))


@pytest.fixture
def connector() -> Any:
    """A connector whose tier has names of its own and no pool node."""
    made = object.__new__(needing_vllm("prfaas.engines.vllm_connector").PrfaasConnector)
    tier = object.__new__(needing_vllm("prfaas.engines.vllm_tier").PrfaasTier)
    tier._layout, tier._names, tier._kept = LAYOUT, {}, set()
    made._tier, made._combined = tier, LAYOUT.groups
    made._cache_config = SimpleNamespace(block_size=32)
    made.connector_scheduler = SimpleNamespace(on_new_request=lambda request: None)
    return made


def request() -> Any:
    fields: dict[str, Any] = {
        "request_id": "r",
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "resumable": False,
        "all_token_ids": list(range(200)),
        "cache_salt": "salt",
    }
    return SimpleNamespace(**fields)


def test_a_key_of_vllm_has_the_name_of_the_shared_chain(connector: Any) -> None:
    base = needing_vllm("vllm.v1.kv_offload.base")
    connector.on_new_request(request())
    context, key = base.ReqContext("r"), base.make_offload_key(b"v" * 32, 0)
    context.set_offload_key_position(key, 2 * SPAN)
    chain = hash_chain(range(200), tokens_per_hash=SPAN, seed="0", cache_salt="salt")
    assert connector._tier._keys([key], context) == [(0, chain[1])]
