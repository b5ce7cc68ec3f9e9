from __future__ import annotations

from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.planner.catalogue import find_model, models
from prfaas.planner.geometry import KvGeometry, LayerKind, kv_bytes
from prfaas.planner.hf_config import geometry_from_config

from . import tiny_models

LLAMA = dict(find_model("llama_3_1_8b").config)
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


def test_shared_layers_store_nothing() -> None:
    config = {**LLAMA, "num_kv_shared_layers": 12}
    assert _one(config).token_bytes == 20 * 8 * 2 * 256


def test_heads_may_differ_by_layer() -> None:
    config = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": [8, 4, 4, 0]}
    assert _one(config).token_bytes == (8 + 4 + 4) * 2 * 256


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


def test_a_missing_field_is_named() -> None:
    config = {k: v for k, v in DEEPSEEK.items() if k != "qk_rope_head_dim"}
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
