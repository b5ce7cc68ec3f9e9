"""Quality classes in `prfaas check`: what becomes of each group, and what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prfaas.cli.deploy.quality_lines import check_quality, quality_lines
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError

KEY = "sha256:" + "0" * 64
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
"""A small model with full attention."""
MLA = QWEN3 | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
"""The same with MLA."""


def deployment_of(
    directory: Path, quality: str, config: dict[str, object], args: str = "", codec: str = "auto"
) -> Deployment:
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    file = directory / "deployment.toml"
    text = f"""
[model]
name = "small"
path = "{model}"
[routing]
offload_threshold = 1000
[security]
identities = "identities"
[tenants.red]
keys = ["{KEY}"]
service_tiers = ["cheap"]
[classes.cheap]
quality = "{quality}"
[clusters.pd]
role = "pd"
[clusters.pd.pools.pd-pool]
link_codec = "{codec}"
[clusters.pd.engines.pd-0]
pool = "pd-pool"
args = [{args}]
"""
    file.write_text(text)
    return load_deployment(file)


FLASH = '"--attention-backend", "FLASH_ATTN"'


@pytest.mark.parametrize(
    ("quality", "args", "expected"),
    [
        ("fp8", "", "full attention rounded 1.9"),
        ("kivi4", FLASH, "full attention rounded 3.1"),
        ("bf16-state", "", "full attention as it is (attention is not rounded"),
    ],
)
def test_a_class_is_shown_with_what_becomes_of_each_group(
    tmp_path: Path, quality: str, args: str, expected: str
) -> None:
    deployment = deployment_of(tmp_path, quality, QWEN3, args)

    check_quality(deployment)
    [line] = quality_lines(deployment)

    assert line.startswith(f"quality: {quality} of classes.cheap at clusters.pd.engines.pd-0: ")
    assert expected in line


@pytest.mark.parametrize(
    ("quality", "config", "args", "reason"),
    [
        ("kivi4", QWEN3, "", "keys and values cannot be told apart"),
        ("kivi4", QWEN3, '"--attention-backend", "FLASHINFER"', "cannot be told apart"),
        ("kivi4", MLA, FLASH, "cannot be taken by the MLA of"),
        ("fp8", QWEN3, '"--kv-cache-dtype", "fp8"', "not in bfloat16"),
    ],
)
def test_a_class_that_a_group_cannot_take_is_refused_with_group_and_reason(
    tmp_path: Path, quality: str, config: dict[str, object], args: str, reason: str
) -> None:
    deployment = deployment_of(tmp_path, quality, config, args)

    with pytest.raises(ConfigError, match=reason) as caught:
        check_quality(deployment)

    assert "clusters.pd.engines.pd-0" in str(caught.value)
    assert str(caught.value).startswith(f"classes.cheap.quality: {quality} cannot be taken by the ")


def test_a_class_on_links_without_codecs_is_refused(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path, "fp8", QWEN3, codec="raw")

    with pytest.raises(ConfigError, match="pool node pd-pool has link_codec"):
        check_quality(deployment)


def test_an_unknown_class_is_refused_by_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quality"):
        deployment_of(tmp_path, "int2", QWEN3)


def test_without_a_lossy_class_nothing_is_said(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path, "lossless", MLA)

    check_quality(deployment)

    assert list(quality_lines(deployment)) == []
