"""Fields that a published config leaves out have the defaults of its config class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import prfaas.planner
from prfaas.errors import ConfigError
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import LayerKind

_DATA = Path(prfaas.planner.__file__).parent / "data" / "hf_defaults.json"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_data_file_is_that_of_the_installed_transformers() -> None:
    program = Path(__file__).with_name("hf_defaults.py")
    output = subprocess.run(
        [sys.executable, str(program)],
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    ).stdout
    assert json.loads(output) == json.loads(_DATA.read_text())


def test_gemma_3_4b_as_published_has_eight_heads_and_every_sixth_layer_global() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": text}
    geometry = geometry_from_config(config)
    assert {g.kind: g.num_layers for g in geometry.groups} == {
        LayerKind.SLIDING: 29,
        LayerKind.FULL: 5,
    }
    assert geometry.token_bytes == 5 * 4 * 256 * 2 * 2
    del text["model_type"]  # the outer type names that of its text part
    assert geometry_from_config(config) == geometry


@pytest.mark.parametrize("listed", [None, []])
@pytest.mark.parametrize("fields", [{}, {"no_rope_layer_interval": 4}, {"nope_layer_interval": 4}])
def test_llama_4_without_a_list_of_layers_has_chunks_in_three_of_four(
    listed: list[int] | None, fields: dict[str, int]
) -> None:
    config: dict[str, object] = {"model_type": "llama4_text", "num_hidden_layers": 48, **fields}
    if listed is not None:
        config["no_rope_layers"] = listed
    kinds = {g.window: g.num_layers for g in geometry_from_config(config).groups}
    assert kinds == {8192: 36, None: 12}
    config["attention_chunk_size"] = None
    assert {g.window for g in geometry_from_config(config).groups} == {None}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert"},
        {"model_type": "bert", "num_hidden_layers": 12, "num_attention_heads": 12},
        {"model_type": "distilbert", "n_layers": 6, "n_heads": 12, "dim": 768},
        {"model_type": "modernbert", "num_hidden_layers": 22, "hidden_size": 768},
        {"model_type": "t5", "num_layers": 12, "num_heads": 12, "d_kv": 64},
        {"model_type": "vit", "num_hidden_layers": 12, "hidden_size": 768},
        {"model_type": "qwen2", "is_causal": False},
    ],
)
def test_what_is_no_decoder_has_no_cache(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="only decoders hand a KV cache"):
        geometry_from_config({"hidden_size": 768} | config)


def test_a_value_of_the_file_comes_before_the_default_of_another_name() -> None:
    config = {"model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "kv_channels": 128}
    config |= {"num_attention_heads": 32, "multi_query_attention": True}
    geometry = geometry_from_config(config | {"multi_query_group_num": 2})
    assert geometry.token_bytes == 28 * 2 * 128 * 2 * 2


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [-1, 2**60, 1.5, float("nan"), float("inf"), True, "8", [8], {}])
def test_a_number_out_of_range_is_named(field: str, value: object) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, field: value}
    with pytest.raises(ConfigError, match=field):
        geometry_from_config(config)


def test_layers_without_end_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="at most 4,096"):
        geometry_from_config({"model_type": "llama", "num_hidden_layers": 10**9})
