"""Weights that one token uses, estimated from a `config.json` for the roofline.

Counts matrices only: projections of attention and recurrent layers, the active experts (or the
dense MLP), and the output head. Norms, biases, routers, low-rank gates and the input embedding are
left out. `tests/planner/model/test_parameters.py` holds it to within 5 % of published figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prfaas.errors import ConfigError
from prfaas.planner.model import hf_layers
from prfaas.planner.model.hf_reader import ConfigReader

_GATED_MATRICES = 3  # gate, up, down
_PLAIN_MATRICES = 2  # up, down
_PLAIN_ACTIVATIONS = ("relu2", "gelu_new", "relu")


def active_parameters(config: Mapping[str, object], name: str = "config.json") -> float | None:
    """Weights that one token uses, or None if the config is not sufficient."""
    try:
        return _active(ConfigReader(config, name))
    except ConfigError:
        return None


def _active(config: ConfigReader) -> float:
    kinds = Counter(hf_layers.layer_kinds(config))
    num_full = sum(
        kinds[k] for k in (hf_layers.FULL, hf_layers.SLIDING, hf_layers.CHUNKED, hf_layers.PARALLEL)
    )
    num_states = kinds[hf_layers.STATE] + kinds[hf_layers.PARALLEL]
    total = float(config.integer("hidden_size") * config.integer("vocab_size"))
    if num_full:
        total += num_full * _attention(config)
    if num_states:
        total += num_states * _recurrent(config)
    total += kinds[hf_layers.CONV] * 4 * config.integer("hidden_size") ** 2
    return total + _mlps(config, kinds)


def _attention(config: ConfigReader) -> int:
    width, heads = config.integer("hidden_size"), config.positive("num_attention_heads")
    rank = config.integer("kv_lora_rank", default=0)
    if rank:
        nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
        value, q_rank = config.integer("v_head_dim"), config.integer("q_lora_rank", default=0)
        queries = heads * (nope + rope)
        query = q_rank * (width + queries) if q_rank else width * queries
        latent = width * (rank + rope) + rank * heads * (nope + value)
        return query + latent + heads * value * width
    dim = config.integer("head_dim", default=width // heads)
    value = config.integer("v_head_dim", default=dim)
    kv_heads = config.integer("num_key_value_heads", default=heads)
    gated = 2 if config.is_set("attn_output_gate") or config.model_type == "qwen3_next" else 1
    return width * (gated * heads * dim + kv_heads * (dim + value) + heads * value)


def _recurrent(config: ConfigReader) -> int:
    width = config.integer("hidden_size")
    if config.has("linear_num_value_heads"):
        keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
        values = config.integer("linear_num_value_heads") * config.integer("linear_value_head_dim")
        return width * (2 * keys + 3 * values)
    nested = config.section("linear_attn_config")
    if nested.has("num_heads") or config.has("linear_num_heads"):
        source = nested if nested.has("num_heads") else config
        heads = source.integer("num_heads", "linear_num_heads")
        return 4 * width * heads * source.integer("head_dim", "linear_head_dim")
    if config.has("mamba_n_heads") or config.has("mamba_num_heads"):
        return width * (3 * _mamba_width(config))
    heads = config.positive("num_attention_heads")
    return 5 * width * heads * config.integer("head_dim", default=width // heads)


def _mamba_width(config: ConfigReader) -> int:
    inner = config.integer("mamba_d_ssm", default=0)
    if not inner and config.has("mamba_head_dim"):
        inner = config.integer("mamba_num_heads") * config.integer("mamba_head_dim")
    return inner or config.integer("mamba_expand", "expand") * config.integer("hidden_size")


def _mlps(config: ConfigReader, kinds: Counter[str]) -> int:
    # If MLPs are separate layers, the other layers have none.
    num_layers = kinds[hf_layers.NONE] or kinds.total()
    width = config.integer("hidden_size")
    plain = config.text("mlp_hidden_act", "hidden_act", "hidden_activation") in _PLAIN_ACTIVATIONS
    matrices = (_PLAIN_MATRICES if plain else _GATED_MATRICES) * width
    active = config.integer("num_experts_per_tok", "num_experts_per_token", default=0)
    if not active:
        return num_layers * matrices * config.integer("intermediate_size")
    num_dense = min(config.integer("first_k_dense_replace", default=0), num_layers)
    expert = config.integer("moe_intermediate_size", "intermediate_size")
    shared = config.integer("shared_expert_intermediate_size", default=0)
    shared += expert * config.integer("n_shared_experts", "num_shared_experts", default=0)
    sparse = (num_layers - num_dense) * matrices * (active * expert + shared)
    return sparse + num_dense * matrices * config.integer("intermediate_size", default=0)
