from __future__ import annotations

from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.planner.model.catalogue import find_model, models
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import KvGeometry, LayerKind, kv_bytes
from tests.planner import tiny_models

LLAMA = dict(find_model("llama_3_1_8b").config)
KIMI: dict[str, Any] = dict(find_model("kimi_linear_48b_a3b").config)
DEEPSEEK = dict(find_model("deepseek_v3").config)


def _one(config: dict[str, Any], **options: str) -> KvGeometry:
    return geometry_from_config(config, name="test", **options)


@pytest.mark.parametrize(
    ("key", "token_bytes", "state_bytes"),
    [
        # 80 layers x 8 heads x 128 x 2 (K, V) x 2 B
        ("llama_3_3_70b", 327_680, 0),
        # 61 layers x (512 + 64) x 2 B
        ("deepseek_v3", 70_272, 0),
        # 15 layers x 2 heads x 256 x 2 x 2 B; 45 x (64 x 128 x 128 x 4 + 3 x 12,288 x 2) B
        ("qwen3_5_397b_a17b", 30_720, 192_061_440),
        # 7 layers x 576 x 2 B; 20 x (32 x 128 x 128 x 4 + 3 x 12,288 x 2) B
        ("kimi_linear_48b_a3b", 8_064, 43_417_600),
    ],
)
def test_known_models(key: str, token_bytes: int, state_bytes: int) -> None:
    geometry = _one(find_model(key).config)
    assert (geometry.token_bytes, geometry.state_bytes) == (token_bytes, state_bytes)


def test_every_catalogue_model_has_a_geometry_and_sources() -> None:
    for model in models().values():
        assert kv_bytes(_one(model.config), 1000) > 0
        assert model.source
        assert model.parameters_source
        assert model.active_parameters <= model.parameters


def test_a_window_bounds_the_cache() -> None:
    geometry = _one(tiny_models.GEMMA3)
    sliding = next(g for g in geometry.groups if g.kind is LayerKind.SLIDING)
    assert sliding.num_bytes(10_000) == sliding.num_bytes(512) == 5 * 512 * 512


@pytest.mark.parametrize(
    ("kv_dtype", "per_head_bytes"),
    [
        ("bfloat16", 256),
        ("fp8", 128),
        ("int8_per_token_head", 132),
        ("int4_per_token_head", 68),
        ("nvfp4", 72),
    ],
)
def test_kv_dtypes_carry_their_scales(kv_dtype: str, per_head_bytes: int) -> None:
    geometry = _one(LLAMA, kv_dtype=kv_dtype)
    assert geometry.token_bytes == 32 * 8 * 2 * per_head_bytes


def test_packed_latent_is_656_bytes() -> None:
    assert _one(DEEPSEEK, kv_dtype="fp8_ds_mla").token_bytes == 61 * 656


@pytest.mark.parametrize(
    ("fields", "num_indexers"),
    [
        ({}, 61),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 17),
        ({"index_topk_pattern": "F" + "S" * 60}, 1),
        ({"indexer_types": ["full", "shared"] * 30 + ["full"]}, 31),
    ],
)
def test_layers_may_share_an_indexer(fields: dict[str, Any], num_indexers: int) -> None:
    # vLLM 0.32, `deepseek_v2.py`: 128 fp8 elements and one fp32 scale in layers that are not
    # skipped.
    geometry = _one({**find_model("deepseek_v3_2").config, **fields})
    indexer = next(g for g in geometry.groups if g.kind is LayerKind.INDEXER)
    assert (indexer.num_layers, indexer.token_bytes) == (num_indexers, 132)


def test_fields_of_published_configs_that_do_not_matter_are_accepted() -> None:
    deepseek: dict[str, Any] = {
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "moe_layer_freq": 1,
        "ep_size": 1,
    }
    deepseek |= {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_scaling": {"factor": 40},
    }
    assert _one({**DEEPSEEK, **deepseek}) == _one(DEEPSEEK)
    kimi = {**KIMI, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    nested = {**KIMI["linear_attn_config"], "kda_layers": [1, 2, 3]}
    assert _one({**kimi, "linear_attn_config": nested}) == _one(KIMI)
    with pytest.raises(ConfigError, match=r"linear_attn_config\.kda_rank"):
        _one({**KIMI, "linear_attn_config": {**nested, "kda_rank": 8}})


def test_shared_layers_store_nothing() -> None:
    config = {**LLAMA, "num_kv_shared_layers": 12}
    assert _one(config).token_bytes == 20 * 8 * 2 * 256


def test_heads_may_differ_by_layer() -> None:
    config = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": [8, 4, 4, 0]}
    assert _one(config).token_bytes == (8 + 4 + 4) * 2 * 256


def test_layers_whose_attention_was_removed_store_nothing() -> None:
    # nemotron-nas (Puzzle): 8 query heads share a KV head, one layer lost its attention.
    kept = {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 5.25}}
    linear = {"attention": {"n_heads_in_group": None, "replace_with_linear": True}}
    gone = {"attention": {"n_heads_in_group": None, "no_op": True}}
    config = {**LLAMA, "model_type": "nemotron-nas", "num_key_value_heads": None}
    config |= {"num_hidden_layers": 4, "block_configs": [kept, linear, gone, kept]}
    assert _one(config).token_bytes == 2 * 4 * 2 * 256
    nameless = {"attention": {"n_heads_in_group": None}}
    with pytest.raises(ConfigError, match="block_configs has neither n_heads_in_group"):
        _one({**config, "block_configs": [nameless] * 4})


def test_attention_layers_named_by_their_index_leave_short_convolutions() -> None:
    attention = {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    config = {**LLAMA, "model_type": "lfm2", "conv_L_cache": 3, "conv_dim": 4096} | attention
    geometry = _one(config)
    assert geometry.token_bytes == 6 * 8 * 2 * 256
    assert geometry.state_bytes == 10 * 2 * 4096 * 2


def test_cross_layer_attention_stores_keys_once_a_group() -> None:
    config = {**LLAMA, "model_type": "hunyuan", "use_cla": True, "cla_share_factor": 2}
    assert _one(config).token_bytes * 2 == _one(LLAMA).token_bytes
    assert _one({**config, "use_cla": False}) == _one(LLAMA)


def test_fields_may_differ_in_one_layer() -> None:
    config = {**LLAMA, "num_hidden_layers": 6, "sliding_window": 512, "head_dim": 256}
    config["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    config["per_layer_config"] = {"05": {"head_dim": 512, "num_key_value_heads": 4}}
    assert _one(config).token_bytes == 4 * 2 * 512 * 2
    config["per_layer_config"] = {"05": {"skip": ["attention"]}}
    assert _one(config).token_bytes == 0


def test_kimi_linear_as_transformers_5_writes_it() -> None:
    flat = {k: v for k, v in KIMI.items() if k != "linear_attn_config"} | {
        "layer_types": ["linear_attention"] * 20 + ["full_attention"] * 7,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "head_dim": 64,  # of attention, beside it
    }
    assert _one(flat).state_bytes == _one(KIMI).state_bytes


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_a_checkpoint_that_asks_for_an_fp8_cache_gets_one(quantization: dict[str, Any]) -> None:
    geometry = _one({**LLAMA, "quantization_config": quantization})
    assert geometry.token_bytes * 2 == _one(LLAMA).token_bytes
    assert _one({**LLAMA, "quantization_config": {"quant_method": "fp8"}}) == _one(LLAMA)
    nested = {"model_type": "llava", "text_config": LLAMA, "quantization_config": quantization}
    assert _one(nested) == geometry
    strange = quantization | {"kv_cache_scheme": {"num_bits": 3, "type": "int"}}
    with pytest.raises(ConfigError, match="kv_cache_scheme"):
        _one({**LLAMA, "quantization_config": strange})


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "mixtral", "novel"])
def test_a_field_that_nobody_knows_is_refused_for_every_architecture(model_type: str) -> None:
    config = {**LLAMA, "model_type": model_type, "mixer_types": ["attention", "rwkv"] * 16}
    with pytest.raises(ConfigError, match="mixer_types"):
        _one(config)


def test_multi_head_and_multi_query_attention() -> None:
    mha = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert _one(mha).token_bytes == 32 * 32 * 2 * 256
    assert _one({**LLAMA, "num_key_value_heads": 1}).token_bytes == 32 * 2 * 256


def test_text_part_of_a_multimodal_config_is_read() -> None:
    nested = {"model_type": "llava", "dtype": "bfloat16", "text_config": LLAMA}
    assert _one(nested) == _one(LLAMA)


def test_an_unknown_layer_type_is_named() -> None:
    config = {**LLAMA, "layer_types": ["full_attention", "telepathy"], "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="layer_types holds 'telepathy'"):
        _one(config)


def test_an_unknown_cache_field_of_an_unknown_architecture_is_named() -> None:
    config = {**LLAMA, "model_type": "novel", "kv_compress_ratio": 4}
    with pytest.raises(ConfigError, match="kv_compress_ratio"):
        _one(config)


def test_an_unknown_architecture_with_known_fields_is_accepted() -> None:
    assert _one({**LLAMA, "model_type": "novel"}) == _one(LLAMA)


def test_a_window_without_layers_is_refused_for_an_unknown_architecture() -> None:
    with pytest.raises(
        ConfigError, match="no field lists the layers of model_type 'novel' that use it"
    ):
        _one({**LLAMA, "model_type": "novel", "sliding_window": 4096})
    mistral = _one({**LLAMA, "model_type": "mistral", "sliding_window": 4096})
    assert mistral.groups[0].kind is LayerKind.SLIDING


def test_a_head_dim_that_does_not_come_out_even_is_refused() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "head_dim"}
    assert _one(config) == _one(LLAMA)
    with pytest.raises(ConfigError, match=r"hidden_size 4096 is no multiple of .* 96"):
        _one({**config, "num_attention_heads": 96})


def test_a_missing_field_is_named() -> None:
    config = {**DEEPSEEK, "qk_rope_head_dim": None}
    with pytest.raises(ConfigError, match="qk_rope_head_dim"):
        _one(config)


def test_contradicting_layer_counts_are_an_error() -> None:
    config = {**LLAMA, "layer_types": ["full_attention"] * 3}
    with pytest.raises(ConfigError, match=r"3 layers, num_hidden_layers says 32"):
        _one(config)


@pytest.mark.parametrize("name", [n for n in dir(tiny_models) if n.isupper() and n[0] != "_"])
def test_tiny_models_are_understood_without_their_name(name: str) -> None:
    config: dict[str, Any] = getattr(tiny_models, name)
    assert kv_bytes(_one(config), 100) > 0
