"""Operations of a prefill, from a model's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prfaas.planner.model.active_parameters import active_parameters
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.hf_reader import ConfigReader
from prfaas.planner.model.kv_geometry import FloatArray, KvGeometry, LayerKind


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model, for the roofline.

    Args:
        active_parameters: Weights that one token uses.
        config: `config.json`, for the attention shapes.
    """

    parameters: float
    active_parameters: float
    config: Mapping[str, object]


def prefill_flops(geometry: KvGeometry, model: ModelSize, num_tokens: FloatArray) -> FloatArray:
    """Operations of one prefill.

    Args:
        model: Sizes and attention shapes.
        num_tokens: Prompt lengths, tokens, any shape.
    """
    flops = 2 * model.active_parameters * num_tokens
    config = ConfigReader(model.config, geometry.name)
    query_key_value, top = _query_key_value(config), _keys_max(config, geometry)
    for group in geometry.groups:
        if group.kind is LayerKind.MLA and top is not None:
            latent = _latent_query_key_value(config)
            flops = flops + group.num_layers * 2 * latent * _visible(num_tokens, top)
        elif group.kind in (LayerKind.FULL, LayerKind.MLA, LayerKind.SLIDING):
            pairs = _visible(num_tokens, group.window)
            flops = flops + group.num_layers * 2 * query_key_value * pairs
        elif group.kind is LayerKind.INDEXER:
            index = config.integer("index_n_heads", default=1) * config.integer("index_head_dim")
            flops = flops + group.num_layers * 2 * index * _visible(num_tokens, None)
        elif group.kind is LayerKind.LINEAR:
            elements = group.state_bytes / 4
            flops = flops + group.num_layers * 4 * elements * num_tokens
    return flops


def attention_tokens(geometry: KvGeometry, model: ModelSize) -> int:
    """Context at which attention costs a token as much as all else, tokens; 0 if it never does.

    Windows and sparse layers count with what they see, so only what grows with the context counts.
    """
    length = float(2**20)
    half, whole = prefill_flops(geometry, model, np.array([length, 2 * length])).tolist()
    square = (whole - 2 * half) / (2 * length**2)
    linear = half / length - square * length
    return round(linear / (2 * square)) if square > 0 and linear > 0 else 0


def attention_tokens_of(config: Mapping[str, object], name: str) -> int:
    """`attention_tokens` of a `config.json`; 0 if the weights of a token cannot be counted.

    Raises:
        ConfigError: The layers of the model are not understood.
    """
    weights = active_parameters(config, name)
    if weights is None:
        return 0
    geometry = geometry_from_config(config, name=name)
    return attention_tokens(geometry, ModelSize(weights, weights, config))


def _visible(num_tokens: FloatArray, window: float | None) -> FloatArray:
    """Pairs of a token and a key that it sees, over a causal prompt."""
    keys_max = np.inf if window is None else float(window)
    short = np.minimum(num_tokens, keys_max)
    return np.asarray(short**2 / 2 + np.maximum(num_tokens - keys_max, 0) * short)


def _keys_max(config: ConfigReader, geometry: KvGeometry) -> int | None:
    """Keys that a token of sparse attention sees at most; None without an indexer."""
    if not any(group.kind is LayerKind.INDEXER for group in geometry.groups):
        return None
    return config.integer("index_topk", default=0) or None


def _latent_query_key_value(config: ConfigReader) -> float:
    """Like `_query_key_value`, of MLA that attends to latents: keys are not expanded."""
    rank = config.integer("kv_lora_rank")
    return config.positive("num_attention_heads") * (2 * rank + config.integer("qk_rope_head_dim"))


def _query_key_value(config: ConfigReader) -> float:
    """Query heads times (key dimension + value dimension) of one attention layer."""
    heads = config.positive("num_attention_heads", "n_head")
    if config.integer("kv_lora_rank", default=0):
        key = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
        return heads * (key + config.integer("v_head_dim"))
    derived = config.integer("hidden_size", "n_embd") // heads
    key = config.integer("head_dim", default=derived)
    return heads * (key + config.integer("v_head_dim", default=key))
