"""kvcache-simulator's public catalogue, rewritten as the config fields the planner reads."""

from __future__ import annotations

from typing import Any

from kvcache_sim.calculator import (
    calculate_cache_size,
    load_models_data,
)

PublicModel = dict[str, Any]

_LAYER_COUNTS = ("full_attention_layers", "linear_attention_layers", "sliding_attention_layers")


def public_models() -> dict[str, PublicModel]:
    return {model["id"]: model for model in load_models_data()["models"]}


def their_bytes(model: PublicModel, num_tokens: int) -> float:
    """Their figure: bf16 cache, states included, no draft (MTP) layers."""
    return float(
        calculate_cache_size(
            model,
            tokens=num_tokens,
            precision="bf16_fp16",
            include_linear_attention_state=True,
            recurrent_state_precision="fp32" if "linear" in model["formula"] else None,
        ).total_bytes
    )


def as_config(model: PublicModel) -> dict[str, Any] | None:
    """A `config.json` with the same fields; None when their formula is one we do not have."""
    fields = dict(model["fields"])
    builder = _BUILDERS.get(model["formula"])
    if builder is None:
        return None
    return {key: value for key, value in builder(fields).items() if not _is_theirs(key)}


def _is_theirs(field: str) -> bool:
    """Fields of the catalogue that no `config.json` has: counts, and settings of their page."""
    return field.startswith(("default_", "kda_", "config_")) or field in (
        *_LAYER_COUNTS,
        "stored_layers",
        "draft_indexer_layers",
        "indexer_shared_layers",
        "index_share_for_mtp_iteration",
    )


def _dense(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"model_type": "llama", "sliding_window": None}


def _mla(fields: dict[str, Any]) -> dict[str, Any]:
    # Which layers have an indexer follows from index_topk_freq, not from their own count.
    own = {key: value for key, value in fields.items() if key != "indexer_full_layers"}
    return own | {"model_type": "deepseek_v3"}


def _gdn(fields: dict[str, Any]) -> dict[str, Any]:
    counts = {"linear_attention": "linear_attention_layers", "full_attention": _LAYER_COUNTS[0]}
    layers = [kind for kind, count in counts.items() for _ in range(fields[count])]
    return fields | {
        "model_type": "qwen3_5_moe",
        "mamba_ssm_dtype": "float32",
        "layer_types": layers,
    }


def _kda(fields: dict[str, Any]) -> dict[str, Any]:
    full = fields["full_attention_layers"]
    return fields | {
        "model_type": "kimi_linear",
        "linear_attn_config": {
            "full_attn_layers": list(range(1, full + 1)),
            "num_heads": fields["kda_num_heads"],
            "head_dim": fields["kda_head_dim"],
            "short_conv_kernel_size": fields["kda_conv_kernel_size"],
        },
    }


def _windows(fields: dict[str, Any]) -> dict[str, Any]:
    counts = {"sliding_attention": _LAYER_COUNTS[2], "full_attention": _LAYER_COUNTS[0]}
    layers = [kind for kind, count in counts.items() for _ in range(fields[count])]
    layers += ["full_attention"] * fields.get("num_kv_shared_layers", 0)
    return fields | {"model_type": "mimo_v2", "layer_types": layers}


_BUILDERS = {
    "standard_gqa": _dense,
    "mla": _mla,
    "dsa_mla": _mla,
    "qwen_linear_full_hybrid": _gdn,
    "kimi_kda_mla_hybrid": _kda,
    "mixed_full_sliding_gqa": _windows,
}
