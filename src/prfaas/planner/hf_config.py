"""KV geometry of a model from its Hugging Face `config.json`.

The fields decide, not the name of the architecture: `hf_layers` says which cache each layer has,
`hf_groups` how large it is. An architecture whose name is unknown is accepted only when every
field that could concern the cache was understood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prfaas.errors import ConfigError
from prfaas.planner import hf_groups, hf_layers
from prfaas.planner.geometry import KvGeometry, LayerGroup
from prfaas.planner.hf_groups import Dtypes
from prfaas.planner.hf_reader import ConfigReader
from prfaas.planner.kv_dtype import canonical_dtype

# Architectures whose fields were checked one by one; see docs/planner.md.
KNOWN_MODEL_TYPES = frozenset(
    (
        "bailing_hybrid",
        "bailing_moe_linear",
        "bamba",
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "falcon_h1",
        "falcon_mamba",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "granitemoehybrid",
        "jamba",
        "kimi_k2",
        "kimi_k25",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "mamba",
        "mamba2",
        "mimo_v2",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "minimax_text_01",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo_hybrid",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
    )
)

# Recurrent states that vLLM keeps in fp32 unless told otherwise.
_FP32_STATES = frozenset({"kimi_linear", "nemotron_h"})


def geometry_from_config(
    config: Mapping[str, object],
    *,
    name: str = "config.json",
    kv_dtype: str = "auto",
    state_dtype: str = "auto",
) -> KvGeometry:
    """KV geometry of the model that a `config.json` describes.

    Args:
        config: Parsed file; multimodal configs are read at their text part.
        name: Where it came from, for messages.
        kv_dtype: Format of keys and values; "auto" is the model's dtype.
        state_dtype: Format of recurrent states; "auto" is what vLLM takes for this model.

    Raises:
        ConfigError: A field is missing or not understood; the message names it.
    """
    reader = ConfigReader(config, name)
    dtypes = _dtypes(reader, kv_dtype, state_dtype)
    kinds = Counter(hf_layers.layer_kinds(reader))
    groups = tuple(_groups(reader, dtypes, kinds))
    _refuse_unread(reader)
    if not groups:
        raise ConfigError(f"{name}: no layer of model_type {reader.model_type!r} has a KV cache")
    return KvGeometry(name, groups, dtypes.kv, dtypes.state)


def _dtypes(reader: ConfigReader, kv_dtype: str, state_dtype: str) -> Dtypes:
    model = canonical_dtype(reader.text("dtype", "torch_dtype") or "bfloat16")
    if state_dtype == "auto":
        state_dtype = reader.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype") or (
            "float32" if reader.model_type in _FP32_STATES else model
        )
    kv = model if kv_dtype == "auto" else canonical_dtype(kv_dtype)
    return Dtypes(kv=kv, conv=model, state=canonical_dtype(state_dtype))


def _groups(reader: ConfigReader, dtypes: Dtypes, kinds: Counter[str]) -> list[LayerGroup]:
    groups: list[LayerGroup] = []
    num_full = kinds[hf_layers.FULL] + kinds[hf_layers.PARALLEL]
    if num_full and reader.is_list("num_key_value_heads"):
        groups += hf_groups.per_layer_attention(reader, dtypes, num_full)
    elif num_full:
        groups += hf_groups.attention(reader, dtypes, num_full)
    if kinds[hf_layers.SLIDING]:
        window = reader.integer("sliding_window", "sliding_window_size")
        groups.append(hf_groups.windowed(reader, dtypes, kinds[hf_layers.SLIDING], window))
    if kinds[hf_layers.CHUNKED]:
        window = reader.integer("attention_chunk_size")
        groups.append(hf_groups.windowed(reader, dtypes, kinds[hf_layers.CHUNKED], window))
    num_states = kinds[hf_layers.STATE] + kinds[hf_layers.PARALLEL]
    if num_states:
        groups.append(hf_groups.recurrent(reader, dtypes, num_states))
    if kinds[hf_layers.CONV]:
        groups.append(hf_groups.short_conv(reader, dtypes, kinds[hf_layers.CONV]))
    return groups


def _refuse_unread(reader: ConfigReader) -> None:
    if reader.model_type in KNOWN_MODEL_TYPES:
        return
    unread = reader.unread_cache_fields()
    if unread:
        raise ConfigError(
            f"{reader.name}: model_type {reader.model_type!r} is unknown and its fields "
            f"{', '.join(unread)} were not understood; describe the cache by hand with "
            "kv_bytes_per_token and kv_state under [model] of the plan file"
        )
