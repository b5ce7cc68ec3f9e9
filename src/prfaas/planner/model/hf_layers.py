"""Cache of each layer of a config: its kind, and the shape fields that differ from the model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prfaas.errors import ConfigError
from prfaas.planner.model.hf_reader import BY_HAND, ConfigReader, is_decoder, layer_pattern

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
    "deepseek_sparse_attention": FULL,
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

# Types with code of their own whose layers all have the window, as vLLM's layers have it.
_ALL_WINDOWED = {"phi3_v"}
# Attention layers in each layer of the config.
_SUBLAYERS = {"longcat_flash": 2}
# Fields by which a config itself chooses its layers.
_CHOOSES = ("sliding_window_pattern", "_sliding_window_pattern", "use_sliding_window")
_PURE_STATE = {"mamba", "mamba2", "falcon_mamba", "bamba"}


# Older or redundant forms of `layer_types`.
_SUPERSEDED = (
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "prefix_dense_sliding_window_pattern",
    "global_attn_every_n_layers",
    "max_window_layers",
    "full_attn_idxs",
    "full_attention_interval",
    "no_rope_layers",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_layer_offset",
    "attn_type_list",
    "block_types",
)


class Layer(NamedTuple):
    """One layer with a cache of its own."""

    kind: str
    """FULL, SLIDING, CHUNKED, STATE, CONV or PARALLEL."""
    overrides: tuple[tuple[str, object], ...] = ()
    """Fields whose value in this layer is not the model's, sorted by name."""


def layers(config: ConfigReader) -> list[Layer]:
    """Layers that store a cache of their own; ConfigError if a layer type is unknown, or fields
    contradict each other.

    Left out are layers without a cache, layers that reuse the cache of an earlier one
    (`num_kv_shared_layers`, cross-layer attention) and layers whose attention was removed
    (`block_configs`, `per_layer_config`).
    """
    kinds = layer_kinds(config)
    overrides = _overrides(config, len(kinds))
    found = [_overridden(kind, own) for kind, own in zip(kinds, overrides, strict=True)]
    return [layer for layer in found if layer.kind != NONE]


def layer_kinds(config: ConfigReader) -> list[str]:
    """Kind of every layer, without those that reuse the cache of an earlier one; ConfigError if a
    layer type is unknown, or fields contradict each other."""
    kinds = _all_layers(config) * _SUBLAYERS.get(config.model_type, 1)
    if SLIDING not in kinds:
        config.supersede("sliding_window", "sliding_window_size", "max_window_layers")
    if CHUNKED not in kinds:
        config.supersede("attention_chunk_size")
    if CONV not in kinds and FULL in kinds and config.has("layer_types"):
        config.supersede("conv_L_cache")
    shared = config.integer("num_kv_shared_layers", default=0)
    kinds = kinds[: len(kinds) - shared]
    return _without_cross_layers(config, kinds)


def _without_cross_layers(config: ConfigReader, kinds: list[str]) -> list[str]:
    """Cross-layer attention (Hunyuan): the first of every `cla_share_factor` layers has keys."""
    factor = config.integer("cla_share_factor", default=1)
    if not config.is_set("use_cla") or factor < 2:
        return kinds
    return [kind if i % factor == 0 else NONE for i, kind in enumerate(kinds)]


def _all_layers(config: ConfigReader) -> list[str]:
    for field in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.is_given(field):
            config.supersede(*_SUPERSEDED)
            kinds = [_word(config, field, word) for word in config.strings(field)]
            return _checked(config, field, kinds)
    num_layers = config.num_layers()
    for field, rule in _RULES.items():
        if config.is_given(field):
            return _checked(config, field, rule(config, num_layers))
    pattern = layer_pattern(config.model_type)
    if pattern and not any(config.is_given(field) for field in _CHOOSES):
        config.supersede(*_SUPERSEDED)
        kinds = [_word(config, "layer_types", word) for word in pattern]
        return [kinds[i % len(kinds)] for i in range(num_layers)]
    for field, rule in (_RULES | {"sliding_window": _windows}).items():
        if config.has(field) and not config.is_list(field):
            return _checked(config, field, rule(config, num_layers))
    return [_default_kind(config)] * num_layers


def _overrides(config: ConfigReader, num_layers: int) -> list[Mapping[str, object]]:
    if config.has("block_configs"):
        return _block_overrides(config, num_layers)
    if config.is_list("num_key_value_heads"):
        return _listed_heads(config, num_layers)
    sparse = config.table("per_layer_config")
    try:
        by_layer = {int(index): own for index, own in sparse.items()}
    except ValueError as problem:
        raise ConfigError(
            f"{config.name}: field per_layer_config has a key that is no layer number: {problem}"
        ) from None
    found = [by_layer.get(i, {}) for i in range(num_layers)]
    if not all(isinstance(own, Mapping) for own in found):
        raise ConfigError(f"{config.name}: field per_layer_config holds something but tables")
    return [own for own in found if isinstance(own, Mapping)]


def _listed_heads(config: ConfigReader, num_layers: int) -> list[Mapping[str, object]]:
    """KV heads as a list, one entry an attention layer, or one a layer."""
    heads = config.integers("num_key_value_heads")
    if len(heads) != num_layers:
        raise ConfigError(
            f"{config.name}: field num_key_value_heads has {len(heads)} entries for "
            f"{num_layers} attention layers"
        )
    return [{"num_key_value_heads": h} if h else {"skip": ["attention"]} for h in heads]


def _block_overrides(config: ConfigReader, num_layers: int) -> list[Mapping[str, object]]:
    """Puzzle models (nemotron-nas): heads per group, or no attention at all, layer by layer."""
    blocks = config.sections("block_configs")[:num_layers]
    return [_block_override(config, block.get("attention")) for block in blocks]


def _block_override(config: ConfigReader, attention: object) -> Mapping[str, object]:
    if not isinstance(attention, Mapping):
        raise ConfigError(f"{config.name}: an entry of block_configs has no table `attention`")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return {"skip": ["attention"]}
    unknown = {k for k, v in attention.items() if v not in (None, False, 0)} - {
        "n_heads_in_group",
        "num_key_value_heads",
    }
    if unknown:
        raise ConfigError(
            f"{config.name}: field block_configs.attention holds {', '.join(sorted(unknown))}, "
            "which is not understood"
        )
    heads = attention.get("num_key_value_heads")
    if heads is None and attention.get("n_heads_in_group"):
        heads = config.positive("num_attention_heads") // int(attention["n_heads_in_group"])
    if not heads:
        raise ConfigError(
            f"{config.name}: an attention layer of block_configs has neither n_heads_in_group nor "
            "num_key_value_heads"
        )
    return {"num_key_value_heads": heads}


def _overridden(kind: str, own: Mapping[str, object]) -> Layer:
    skipped = own.get("skip") or ()
    if isinstance(skipped, list) and any("att" in str(part) for part in skipped):
        return Layer(NONE)
    if kind == SLIDING and "sliding_window" in own and own["sliding_window"] is None:
        kind = FULL
    return Layer(kind, tuple(sorted((k, v) for k, v in own.items() if k != "skip")))


def _word(config: ConfigReader, field: str, word: str) -> str:
    try:
        kind = _WORDS[word]
    except KeyError:
        known = ", ".join(repr(w) for w in _WORDS)
        raise ConfigError(
            f"{config.name}: field {field} holds {word!r}, which is not understood; "
            f"known layer types: {known}; {BY_HAND}"
        ) from None
    if kind == SLIDING and not config.has("sliding_window"):
        return FULL
    if kind == CHUNKED and not config.has("attention_chunk_size"):
        return FULL
    return kind


def _checked(config: ConfigReader, field: str, kinds: list[str]) -> list[str]:
    expected = config.num_layers(default=len(kinds))
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
    nested.supersede("kda_layers")
    return [FULL if i + 1 in full else STATE for i in range(num_layers)]


def _layer_group_size(config: ConfigReader, num_layers: int) -> list[str]:
    group = config.integer("layer_group_size")
    whole = num_layers // group * group
    return [FULL if (i + 1) % group == 0 or i >= whole else STATE for i in range(num_layers)]


def _listed(config: ConfigReader, num_layers: int, field: str, others: str) -> list[str]:
    """Full attention in the layers that a field lists, numbered from 0."""
    full = set(config.integers(field))
    return [FULL if i in full else others for i in range(num_layers)]


def _flagged(config: ConfigReader, field: str, one: str, others: str) -> list[str]:
    """A kind of layer for each 1 that a field has."""
    return [one if flag == 1 else others for flag in config.integers(field)]


def _attn_layer_period(config: ConfigReader, num_layers: int) -> list[str]:
    period = config.integer("attn_layer_period")
    offset = config.integer("attn_layer_offset")
    return [FULL if i % period == offset else STATE for i in range(num_layers)]


def _no_rope_layers(config: ConfigReader, _num_layers: int) -> list[str]:
    chunked = CHUNKED if config.has("attention_chunk_size") else FULL
    return [chunked if rope else FULL for rope in config.integers("no_rope_layers")]


def _no_rope_layer_interval(config: ConfigReader, num_layers: int) -> list[str]:
    chunked = CHUNKED if config.has("attention_chunk_size") else FULL
    return _every(num_layers, config.positive("no_rope_layer_interval"), chunked)


def _windows(config: ConfigReader, num_layers: int) -> list[str]:
    if config.has("use_sliding_window") and not config.is_set("use_sliding_window"):
        return [FULL] * num_layers
    if config.is_set("use_sliding_window") and config.has("max_window_layers"):
        first = config.integer("max_window_layers")
        return [SLIDING if i >= first else FULL for i in range(num_layers)]
    every = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=0)
    if every:
        return _every(num_layers, every, SLIDING)
    is_known = is_decoder(config.model_type) or config.model_type in _ALL_WINDOWED
    if is_known or config.is_set("use_sliding_window"):
        return [SLIDING] * num_layers
    raise ConfigError(
        f"{config.name}: field sliding_window is set, but no field lists the layers of model_type "
        f"{config.model_type!r} that use it; {BY_HAND}"
    )


# Field -> how it assigns kinds; the first field that is there decides.
_RULES: dict[str, Callable[[ConfigReader, int], list[str]]] = {
    "linear_attn_config": _kda_lists,
    "attn_type_list": lambda c, _: _flagged(c, "attn_type_list", FULL, STATE),
    "hybrid_layer_pattern": lambda c, _: _flagged(c, "hybrid_layer_pattern", SLIDING, FULL),
    "layer_group_size": _layer_group_size,
    "full_attention_interval": lambda c, n: _every(n, c.integer("full_attention_interval"), STATE),
    "attn_layer_indices": lambda c, n: _listed(c, n, "attn_layer_indices", STATE),
    "full_attn_idxs": lambda c, n: _listed(c, n, "full_attn_idxs", CONV),
    "global_attn_every_n_layers": lambda c, n: _every(
        n, c.positive("global_attn_every_n_layers"), SLIDING
    ),
    "attn_layer_period": _attn_layer_period,
    "no_rope_layers": _no_rope_layers,
    "no_rope_layer_interval": _no_rope_layer_interval,
}
