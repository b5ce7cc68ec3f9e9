"""Estimated active parameters against the published figures."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.planner.model.active_parameters import active_parameters

transformers = pytest.importorskip("transformers")

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
QWEN35 = {"hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32}
QWEN35 |= {"linear_num_value_heads": 64, "moe_intermediate_size": 1024, "num_experts_per_tok": 10}
QWEN35 |= {"shared_expert_intermediate_size": 1024, "attn_output_gate": True}


@pytest.mark.parametrize(
    ("name", "fields", "published"),
    [
        # 8.03 B less the input embedding, which no token multiplies with.
        ("LlamaConfig", LLAMA_8B, 8.03e9 - 0.53e9),
        ("Qwen3_5MoeTextConfig", QWEN35, 17e9),
        ("DeepseekV3Config", {}, 37e9),
        ("GptOssConfig", {}, 5.1e9),
        ("Qwen3NextConfig", {"num_hidden_layers": 48}, 3.5e9),  # "A3B"
        ("MiniMaxM2Config", {"intermediate_size": 1536}, 10e9),
        ("MiMoV2FlashConfig", {}, 15e9),
    ],
)
def test_estimates_are_near(name: str, fields: dict[str, Any], published: float) -> None:
    config = {**getattr(transformers, name)().to_dict(), **fields}
    config["layer_types"] = getattr(transformers, name)(**fields).to_dict().get("layer_types")
    assert active_parameters(config) == pytest.approx(published, rel=0.05)


def test_a_config_that_says_too_little_has_no_estimate() -> None:
    assert active_parameters({"model_type": "llama", "num_hidden_layers": 2}) is None
