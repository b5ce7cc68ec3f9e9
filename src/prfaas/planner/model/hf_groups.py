"""Layer groups from the shape fields of a config: attention, latents, states.

State shapes follow vLLM's `MambaStateShapeCalculator`, state dtypes its
`MambaStateDtypeCalculator` and per-model defaults (vLLM 0.32, `mamba_utils.py`, `config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.errors import ConfigError
from prfaas.planner.model.hf_reader import BY_HAND, ConfigReader
from prfaas.planner.model.kv_geometry import (
    LayerGroup,
    LayerKind,
    element_bytes,
    mla_vector_bytes,
    vector_bytes,
)

# Shapes of what MLA computes from the latent, which is not stored.
_EXPANDED = (
    "head_dim",
    "qk_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_key_value_heads",
    "index_n_heads",
    "index_topk",
)

# Types whose latent vLLM 0.32 stores (`ModelArchConfigConvertorBase.is_deepseek_mla`).
MLA_TYPES = frozenset(
    {
        "axk1",
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots3_note",
        "glm4_moe_lite",
        "glm5_next",
        "glm5_next_text",
        "glm_moe_dsa",
        "hy_v4",
        "kimi_k2",
        "kimi_linear",
        "longcat_flash",
        "pangu_ultra_moe",
    }
)

# Types whose latent it expands to keys and values of every head before it stores them.
_EXPANDED_TYPES = frozenset({"minicpm3"})

# vLLM keeps indexer keys in fp8 with one fp32 scale per 128 elements (`deepseek_v2.py`).
_INDEXER_SCALED_ELEMENTS = 128


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Formats the groups are stored in."""

    kv: str
    """Keys, values and latents."""
    conv: str
    """Convolution inputs: the model's dtype."""
    state: str


def attention(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> list[LayerGroup]:
    """Full-attention layers: MLA where the engine stores the latent, otherwise MHA / GQA / MQA."""
    if config.integer("kv_lora_rank", default=0):
        if config.model_type in MLA_TYPES:
            return _mla(config, dtypes, num_layers)
        if config.model_type in _EXPANDED_TYPES:
            return [_expanded(config, dtypes, num_layers)]
        raise ConfigError(
            f"{config.name}: field kv_lora_rank is set, and it is not known whether engines store "
            f"the latent of model_type {config.model_type!r} or keys and values of every head; "
            f"{BY_HAND}"
        )
    head_dim = config.integer(
        "global_head_dim", "head_dim", "attention_head_dim", "kv_channels", default=0
    )
    head_dim = head_dim or _derived_head_dim(config)
    value_dim = config.integer("v_head_dim", default=head_dim)
    heads = _kv_heads(config)
    return [_gqa(dtypes, num_layers, heads=heads, head_dim=head_dim, value_dim=value_dim)]


def _expanded(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> LayerGroup:
    """Keys and values of all heads from a latent that is not stored; values are padded to keys."""
    heads = config.positive("num_attention_heads")
    head_dim = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    config.supersede(*_EXPANDED)
    return _gqa(dtypes, num_layers, heads=heads, head_dim=head_dim, value_dim=head_dim)


def _kv_heads(config: ConfigReader) -> int:
    if config.is_set("multi_query_attention"):  # ChatGLM
        return config.positive("multi_query_group_num")
    # Falcon and GPT-BigCode: one head when `multi_query` is set and no newer layout is named.
    one = config.is_set("multi_query") and not config.is_set("new_decoder_architecture")
    named = config.integer(
        "num_global_key_value_heads",
        "num_key_value_heads",
        "num_kv_heads",
        "num_attention_heads",
        "n_head",
    )
    return 1 if one else named


def sliding(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> list[LayerGroup]:
    """Sliding-window attention."""
    window = config.integer("sliding_window", "sliding_window_size")
    config.supersede("sliding_window_size")
    if config.model_type.startswith("cohere2"):
        window += 1  # Its tokens attend to so many before them, and to themselves.
    return [windowed(config, dtypes, num_layers, window)]


def chunked(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> list[LayerGroup]:
    """Attention within chunks of fixed length."""
    return [windowed(config, dtypes, num_layers, config.integer("attention_chunk_size"))]


def parallel(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> list[LayerGroup]:
    """Attention and a recurrent state side by side in one layer."""
    states = recurrent(config, dtypes, num_layers)
    return [*attention(config, dtypes, num_layers), *states]


def windowed(config: ConfigReader, dtypes: Dtypes, num_layers: int, window: int) -> LayerGroup:
    """Sliding-window or chunked attention, which keeps `window` tokens at most."""
    if config.model_type == "mimo_v2_flash":
        heads = config.integer("swa_num_key_value_heads")  # twice the others', never the same
    else:
        heads = config.integer(
            "swa_num_key_value_heads", "num_key_value_heads", "num_attention_heads"
        )
    config.supersede("swa_num_attention_heads")
    head_dim = config.integer("swa_head_dim", "head_dim", default=0) or _derived_head_dim(config)
    value_dim = config.integer("swa_v_head_dim", "v_head_dim", default=head_dim)
    return _gqa(
        dtypes, num_layers, heads=heads, head_dim=head_dim, value_dim=value_dim, window=window
    )


def short_conv(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> list[LayerGroup]:
    """Gated short convolutions (LFM2): the last `kernel - 1` inputs."""
    kernel = config.integer("conv_L_cache", "conv_kernel", default=3)
    width = config.integer("conv_dim", "hidden_size")
    state = (kernel - 1) * width * element_bytes(dtypes.conv)
    detail = f"{kernel - 1} x {width}, {dtypes.conv}"
    return [LayerGroup(LayerKind.SHORT_CONV, num_layers, state_bytes=state, detail=detail)]


def recurrent(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> list[LayerGroup]:
    """Linear and recurrent layers; the fields that are there tell which kind; ConfigError if the
    config has recurrent layers of a kind that is not understood."""
    if config.has("linear_num_value_heads"):
        return [_gated_delta_net(config, dtypes, num_layers)]
    if config.has("linear_attn_config") or config.has("linear_num_heads"):
        return [_kda(config, dtypes, num_layers)]
    if config.has("attn_type_list") or config.model_type in _LIGHTNING:
        return [_lightning(config, dtypes, num_layers)]
    if any(config.has(f) for f in ("mamba_n_heads", "mamba_num_heads")):
        return [_mamba2(config, dtypes, num_layers)]
    if config.model_type == "mamba2":
        return [_mamba2(config, dtypes, num_layers)]
    if config.has("mamba_d_state") or config.has("state_size"):
        return [_mamba1(config, dtypes, num_layers)]
    raise ConfigError(
        f"{config.name}: model_type {config.model_type!r} has {num_layers} linear or recurrent "
        "layers, but none of the fields linear_num_value_heads, linear_attn_config, "
        "attn_type_list, mamba_n_heads, mamba_d_state has the size of their state"
    )


_LIGHTNING = {"minimax", "minimax_text_01", "bailing_moe_linear", "bailing_hybrid"}


def _gqa(
    dtypes: Dtypes,
    num_layers: int,
    *,
    heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None = None,
) -> LayerGroup:
    kind = LayerKind.FULL if window is None else LayerKind.SLIDING
    per_head = vector_bytes(head_dim, dtypes.kv) + vector_bytes(value_dim, dtypes.kv)
    shape = f"{head_dim}" if head_dim == value_dim else f"{head_dim}+{value_dim}"
    detail = f"{heads} KV heads x {shape}" + (f", window {window}" if window else "")
    return LayerGroup(kind, num_layers, heads * per_head, window=window, detail=detail)


def _mla(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> list[LayerGroup]:
    rank = config.integer("kv_lora_rank")
    rope = config.integer("qk_rope_head_dim")
    token = mla_vector_bytes(rank, rope, dtypes.kv)
    config.supersede(*_EXPANDED)
    groups = [LayerGroup(LayerKind.MLA, num_layers, token, detail=f"latent {rank} + rope {rope}")]
    index_dim = config.integer("index_head_dim", default=0)
    if index_dim:
        scales = -(-index_dim // _INDEXER_SCALED_ELEMENTS) * 4
        indexers = _num_indexers(config, num_layers)
        detail = f"{index_dim} fp8 + {scales} B of scales"
        groups.append(LayerGroup(LayerKind.INDEXER, indexers, index_dim + scales, detail=detail))
    return groups


def _num_indexers(config: ConfigReader, num_layers: int) -> int:
    """Layers with an indexer of their own; the others reuse the nearest earlier one's choice."""
    config.supersede("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
    if config.has("indexer_types"):
        return config.strings("indexer_types")[:num_layers].count("full")
    if config.has("index_topk_pattern"):
        pattern = config.strings("index_topk_pattern")[:num_layers]
        return num_layers - pattern.count("S") - pattern.count("shared")
    every = max(config.integer("index_topk_freq", default=1), 1)
    offset = config.integer("index_skip_topk_offset", default=2)
    return sum(max(i - offset + 1, 0) % every == 0 for i in range(num_layers))


def _state_group(
    num_layers: int, dtypes: Dtypes, conv_elements: int, state: tuple[int, ...], name: str
) -> LayerGroup:
    elements = 1
    for size in state:
        elements *= size
    num_bytes = conv_elements * element_bytes(dtypes.conv) + elements * element_bytes(dtypes.state)
    shape = " x ".join(str(size) for size in state)
    conv = f" + conv {conv_elements} {dtypes.conv}" if conv_elements else ""
    detail = f"{name} {shape} {dtypes.state}{conv}"
    return LayerGroup(LayerKind.LINEAR, num_layers, state_bytes=num_bytes, detail=detail)


def _gated_delta_net(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> LayerGroup:
    k_heads, v_heads = (
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
    )
    k_dim, v_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    kernel = config.integer("linear_conv_kernel_dim")
    conv = (kernel - 1) * (2 * k_heads * k_dim + v_heads * v_dim)
    return _state_group(num_layers, dtypes, conv, (v_heads, v_dim, k_dim), "Gated DeltaNet")


def _kda(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> LayerGroup:
    nested = config.section("linear_attn_config")
    source = nested if nested.has("num_heads") else config
    heads = source.integer("num_heads", "linear_num_heads")
    # transformers 5 writes the same fields flat, beside a `head_dim` of attention.
    dim = source.integer("head_dim") if source is nested else source.integer("linear_head_dim")
    kernel = source.integer("short_conv_kernel_size", "linear_conv_kernel_dim", default=4)
    conv = (kernel - 1) * 3 * heads * dim
    return _state_group(num_layers, dtypes, conv, (heads, dim, dim), "KDA")


def _lightning(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> LayerGroup:
    heads = config.positive("num_attention_heads")
    dim = config.integer("head_dim", default=0) or _derived_head_dim(config)
    config.supersede("block_size")  # tokens computed at a time
    return _state_group(num_layers, dtypes, 0, (heads, dim, dim), "Lightning")


def _mamba2(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> LayerGroup:
    heads = config.integer("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = config.integer("mamba_d_ssm", default=0)
    if not inner and config.has("mamba_head_dim"):
        inner = heads * config.integer("mamba_head_dim")
    if not inner:
        inner = config.integer("mamba_expand", "expand") * config.integer("hidden_size")
    state = config.integer("mamba_d_state", "ssm_state_size", "state_size")
    groups = config.integer("mamba_n_groups", "n_groups", default=1)
    kernel = config.integer("mamba_d_conv", "conv_kernel")
    conv = (kernel - 1) * (inner + 2 * groups * state)
    config.supersede("mamba_d_head", "mamba_expand", "expand", "head_dim")
    return _state_group(num_layers, dtypes, conv, (heads, inner // heads, state), "Mamba-2")


def _mamba1(config: ConfigReader, dtypes: Dtypes, num_layers: int) -> LayerGroup:
    inner = config.integer("mamba_expand", "expand") * config.integer("hidden_size")
    state = config.integer("mamba_d_state", "state_size")
    conv = (config.integer("mamba_d_conv", "conv_kernel") - 1) * inner
    return _state_group(num_layers, dtypes, conv, (inner, state), "Mamba-1")


def _derived_head_dim(config: ConfigReader) -> int:
    width = config.integer("hidden_size", "n_embd")
    heads = config.positive("num_attention_heads", "n_head")
    if width % heads:
        raise ConfigError(
            f"{config.name}: field head_dim is missing, and hidden_size {width} is no multiple of "
            f"num_attention_heads {heads}"
        )
    return width // heads
