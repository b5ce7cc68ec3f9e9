"""Which cache each layer of a config has: one word per layer, from whatever field says so."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.errors import ConfigError
from prfaas.planner.hf_reader import ConfigReader

FULL, SLIDING, CHUNKED, STATE, CONV, PARALLEL, NONE = (
    "full",
    "sliding",
    "chunked",
    "state",
    "conv",
    "parallel",  # attention and a recurrent state side by side in one layer
    "none",
)

_WORDS = {
    "full_attention": FULL,
    "attention": FULL,
    "indexed_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "conv": CONV,
    "short_conv": CONV,
    "mlp": NONE,
    "moe": NONE,
    "M": STATE,
    "*": FULL,
    "-": NONE,
    "E": NONE,
}

# Layer i is global when (i + 1) is a multiple of this, for families whose configs leave it out.
_GLOBAL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}
_PURE_STATE = {"mamba", "mamba2", "falcon_mamba", "bamba"}


def layer_kinds(config: ConfigReader) -> list[str]:
    """Kind of every layer that stores a cache of its own.

    Layers that reuse the cache of an earlier one (`num_kv_shared_layers`) are left out.

    Raises:
        ConfigError: A layer type is unknown, or fields contradict each other.
    """
    kinds = _all_layers(config)
    shared = config.integer("num_kv_shared_layers", default=0)
    return kinds[: len(kinds) - shared]


def _all_layers(config: ConfigReader) -> list[str]:
    for field in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.has(field):
            kinds = [_word(config, field, word) for word in config.strings(field)]
            return _checked(config, field, kinds)
    num_layers = config.integer("num_hidden_layers", "n_layer")
    for field, rule in _RULES.items():
        if config.has(field):
            return _checked(config, field, rule(config, num_layers))
    return [_default_kind(config)] * num_layers


def _word(config: ConfigReader, field: str, word: str) -> str:
    try:
        kind = _WORDS[word]
    except KeyError:
        known = ", ".join(repr(w) for w in _WORDS)
        raise ConfigError(
            f"{config.name}: field {field} holds {word!r}, which is not understood; "
            f"known layer types: {known}"
        ) from None
    if kind == SLIDING and not config.has("sliding_window"):
        return FULL
    return kind


def _checked(config: ConfigReader, field: str, kinds: list[str]) -> list[str]:
    expected = config.integer("num_hidden_layers", "n_layer", default=len(kinds))
    if len(kinds) != expected and field != "hybrid_override_pattern":
        raise ConfigError(
            f"{config.name}: field {field} describes {len(kinds)} layers, num_hidden_layers "
            f"says {expected}; one of them is wrong"
        )
    return kinds


def _default_kind(config: ConfigReader) -> str:
    if config.model_type in _PURE_STATE:
        return STATE
    if config.model_type == "falcon_h1":
        return PARALLEL
    return FULL


def _every(num_layers: int, period: int, others: str) -> list[str]:
    return [FULL if (i + 1) % period == 0 else others for i in range(num_layers)]


def _kda_lists(config: ConfigReader, num_layers: int) -> list[str]:
    nested = config.section("linear_attn_config")
    full = set(nested.integers("full_attn_layers"))  # numbered from 1
    return [FULL if i + 1 in full else STATE for i in range(num_layers)]


def _attn_type_list(config: ConfigReader, _num_layers: int) -> list[str]:
    return [FULL if kind == 1 else STATE for kind in config.integers("attn_type_list")]


def _hybrid_layer_pattern(config: ConfigReader, _num_layers: int) -> list[str]:
    return [SLIDING if flag == 1 else FULL for flag in config.integers("hybrid_layer_pattern")]


def _layer_group_size(config: ConfigReader, num_layers: int) -> list[str]:
    group = config.integer("layer_group_size")
    whole = num_layers // group * group
    return [FULL if (i + 1) % group == 0 or i >= whole else STATE for i in range(num_layers)]


def _attn_layer_indices(config: ConfigReader, num_layers: int) -> list[str]:
    full = set(config.integers("attn_layer_indices"))
    return [FULL if i in full else STATE for i in range(num_layers)]


def _attn_layer_period(config: ConfigReader, num_layers: int) -> list[str]:
    period = config.integer("attn_layer_period")
    offset = config.integer("attn_layer_offset")
    return [FULL if i % period == offset else STATE for i in range(num_layers)]


def _no_rope_layers(config: ConfigReader, _num_layers: int) -> list[str]:
    return [CHUNKED if rope else FULL for rope in config.integers("no_rope_layers")]


def _windows(config: ConfigReader, num_layers: int) -> list[str]:
    if config.has("use_sliding_window") and not config.is_set("use_sliding_window"):
        return [FULL] * num_layers
    if config.is_set("use_sliding_window") and config.has("max_window_layers"):
        first = config.integer("max_window_layers")
        return [SLIDING if i >= first else FULL for i in range(num_layers)]
    if config.model_type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        return [FULL] * num_layers
    every = config.integer(
        "sliding_window_pattern",
        "_sliding_window_pattern",
        default=_GLOBAL_EVERY.get(config.model_type, 0),
    )
    return _every(num_layers, every, SLIDING) if every else [SLIDING] * num_layers


# Field -> how it assigns kinds; the first field that is there decides.
_RULES: dict[str, Callable[[ConfigReader, int], list[str]]] = {
    "linear_attn_config": _kda_lists,
    "attn_type_list": _attn_type_list,
    "hybrid_layer_pattern": _hybrid_layer_pattern,
    "layer_group_size": _layer_group_size,
    "full_attention_interval": lambda c, n: _every(n, c.integer("full_attention_interval"), STATE),
    "attn_layer_indices": _attn_layer_indices,
    "attn_layer_period": _attn_layer_period,
    "no_rope_layers": _no_rope_layers,
    "sliding_window": _windows,
}
