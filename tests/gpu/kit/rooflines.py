"""The planner's roofline for one layer: the one place of the kit that calls it."""

from __future__ import annotations

from typing import Any

import numpy as np

from prfaas.planner.hardware.roofline import ModelSize, prefill_flops
from prfaas.planner.model.catalogue import Accelerator, accelerators
from prfaas.planner.model.hf_config import geometry_from_config

CPU = Accelerator(
    name="one CPU core",
    bf16_flop_per_s=5e10,
    fp8_flop_per_s=5e10,
    memory_bytes_per_s=1e10,
    memory_bytes=8e9,
    source="a guess",
)


def accelerator(device: str) -> Accelerator:
    """Return the catalogue's entry of the GPU that is here; a guess for a CPU."""
    if device != "cuda":
        return CPU
    import torch

    name = torch.cuda.get_device_name(0)
    return accelerators()["h200" if "H200" in name else "h100"]


def config_of(shape: Any) -> dict[str, object]:
    """Return a configuration of a model of one such layer."""
    config: dict[str, object] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.key_size,
        "intermediate_size": shape.intermediate,
        "vocab_size": 1000,
    }
    if shape.kind == "sliding":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        config["sliding_window"] = shape.window
    elif shape.kind == "mla":
        rope = shape.key_size - shape.value_size
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        config |= {"kv_lora_rank": shape.latent, "qk_rope_head_dim": rope}
        config |= {"qk_nope_head_dim": shape.value_size, "v_head_dim": shape.value_size}
    elif shape.kind == "gdn":
        del config["head_dim"]  # There is no attention.
        config |= {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
        config |= {
            "layer_types": ["linear_attention"],
            "linear_num_key_heads": shape.kv_heads,
            "linear_num_value_heads": shape.heads,
            "linear_key_head_dim": shape.key_size,
            "linear_value_head_dim": shape.value_size,
            "linear_conv_kernel_dim": 4,
        }
    return config


def parameters_of(shape: Any) -> int:
    """Return the weights of the layer."""
    queries, keys = shape.heads * shape.key_size, shape.kv_heads * shape.key_size
    values = shape.kv_heads * shape.value_size
    mlp = 3 * shape.hidden * shape.intermediate + shape.heads * shape.value_size * shape.hidden
    if shape.kind == "mla":
        up = shape.latent * shape.heads * (shape.key_size + shape.value_size)
        return int(mlp + shape.hidden * (shape.latent + queries) + up)
    if shape.kind == "gdn":
        queries, values = shape.kv_heads * shape.key_size, shape.heads * shape.value_size
        return int(mlp + shape.hidden * (queries + keys + values + 2 * shape.heads))
    return int(mlp + shape.hidden * (queries + keys + values))


def roofline_s(shape: Any, new: int, prefix: int, device: str) -> float:
    """Return T(prefix, new) of the roofline at the full tensor peak, seconds.

    Prefill of the whole less prefill of the prefix: what is left is the new tokens' own work, over
    all that they see.
    """
    config, gpu = config_of(shape), accelerator(device)
    geometry = geometry_from_config(config, state_dtype="float32")
    weights = float(parameters_of(shape))
    size = ModelSize(weights, weights, config)
    both = np.array([float(prefix + new), float(prefix)])
    whole, cached = prefill_flops(geometry, size, both)
    return float(max((whole - cached) / gpu.bf16_flop_per_s, 2 * weights / gpu.memory_bytes_per_s))
