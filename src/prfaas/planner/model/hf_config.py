"""KV geometry of a model from its Hugging Face config.

The fields decide, not the name of the architecture: `hf_layers` gives the cache of each layer,
`hf_groups` its size. A config is accepted only if every field that is set was read or is known not
to matter (`hf_reader`), also for architectures that are well known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from prfaas.limited_files import read_json
from prfaas.planner.model import hf_groups, hf_layers
from prfaas.planner.model.hf_groups import Dtypes
from prfaas.planner.model.hf_reader import BY_HAND, ConfigReader, is_decoder, is_encoder
from prfaas.planner.model.kv_geometry import KvGeometry, LayerGroup, canonical_dtype

_BY_NAME = {"fp8": "fp8", "nvfp4": "nvfp4"}
_BY_BITS = {8: "fp8", 4: "nvfp4"}


def quantized_kv_dtype(config: ConfigReader) -> str | None:
    """The format an engine takes for `--kv-cache-dtype auto`, or None for the model's own dtype.

    Raises:
        ConfigError: The checkpoint names a format that is not known here.

    References:
        vLLM 0.32, `_normalize_quantization_config` and `get_kv_cache_quant_algo_string` (ModelOpt)
        and `Attention.__init__` (compressed-tensors: a `kv_cache_scheme` means fp8). Other methods
        leave the cache as it is.
    """
    outer = config.table("quantization_config") or config.table("compression_config")
    inner = outer.get("quantization")
    tables = [inner, outer] if isinstance(inner, Mapping) else [outer]
    method = str(outer.get("quant_method") or "").lower().replace("_", "-")
    if method == "compressed-tensors":
        fields: tuple[str, ...] = ("kv_cache_scheme",)
    elif method.startswith("modelopt") or _is_modelopt(outer, inner):
        fields = ("kv_cache_scheme", "kv_cache_quant_algo")
    else:
        return None
    for field in fields:
        for table in tables:
            asked = table.get(field)
            if asked:
                return _format(config, field, asked)
    return None


def _is_modelopt(outer: Mapping[str, object], inner: object) -> bool:
    """Return True for ModelOpt's own file, which names no method but what made it."""
    producer = outer.get("producer")
    made = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    if not isinstance(inner, Mapping) or not inner.get("quant_algo"):
        return False
    return made or "modelopt_quant_config" in inner


def read_quantization_beside(config: dict[str, Any], path: Path) -> None:
    """Add the `hf_quant_config.json` beside a `config.json` that has no `quantization_config`;
    ConfigError if the file is there and cannot be read.

    ModelOpt before 0.31 wrote that file; engines read it.

    Args:
        config: The parsed `config.json`; changed in place.
    """
    beside = path.with_name("hf_quant_config.json")
    if config.get("quantization_config") is not None or not beside.is_file():
        return
    config["quantization_config"] = read_json(beside)


def _format(config: ConfigReader, field: str, asked: object) -> str | None:
    if isinstance(asked, Mapping):
        bits = asked.get("num_bits")
        known = _BY_BITS.get(bits) if asked.get("type") == "float" and bits in _BY_BITS else None
    else:
        known = _BY_NAME.get(str(asked).lower())
        if str(asked).lower() in ("none", "auto"):
            return None
    if known is None:
        raise ConfigError(
            f"{config.name}: field quantization_config.{field} is {asked!r}, a KV cache format "
            "that is not known; name the one your engine takes with --kv-dtype (or kv_dtype under "
            "[model])"
        )
    return known


# Recurrent states that vLLM keeps in fp32 by default.
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
    _refuse_encoders(reader)
    dtypes = _dtypes(reader, kv_dtype, state_dtype)
    groups = tuple(_groups(reader, dtypes))
    unread = reader.unread_fields()
    if unread:
        raise ConfigError(
            f"{name}: model_type {reader.model_type!r} has the fields {', '.join(unread)}, which "
            f"were not understood and may change the cache; {BY_HAND}"
        )
    if not groups:
        raise ConfigError(f"{name}: no layer of model_type {reader.model_type!r} has a KV cache")
    return KvGeometry(name, groups, dtypes.kv, dtypes.state)


def _refuse_encoders(reader: ConfigReader) -> None:
    known = is_encoder(reader.model_type) and not reader.is_set("is_decoder")
    fields = ["is_encoder_decoder", "cross_attention_layers"]
    if not is_decoder(reader.model_type):
        fields.append("type_vocab_size")
    found = next((f"field {field} is set" for field in fields if reader.is_set(field)), None)
    if reader.is_given("is_causal") and not reader.is_set("is_causal"):
        found = "field is_causal is false"
    if known or found:
        raise ConfigError(
            f"{reader.name}: {found or 'field model_type names no decoder'}: model_type "
            f"{reader.model_type!r} is an encoder, attends to one, or generates no text; only "
            "decoders hand a KV cache from prefill to decode"
        )


def _dtypes(reader: ConfigReader, kv_dtype: str, state_dtype: str) -> Dtypes:
    model = canonical_dtype(reader.text("dtype", "torch_dtype") or "bfloat16")
    if model == "float32":
        model = "bfloat16"  # as engines serve such a checkpoint with `--dtype auto`
    asked = reader.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    if state_dtype == "auto":
        state_dtype = asked or ("float32" if reader.model_type in _FP32_STATES else model)
    if kv_dtype == "auto":
        kv_dtype = quantized_kv_dtype(reader) or model
    kv = canonical_dtype(kv_dtype)
    return Dtypes(kv=kv, conv=model, state=canonical_dtype(state_dtype))


def _groups(reader: ConfigReader, dtypes: Dtypes) -> Iterator[LayerGroup]:
    for layer, count in Counter(hf_layers.layers(reader)).items():
        own = reader.overlaid(dict(layer.overrides))
        yield from _GROUPS[layer.kind](own, dtypes, count)


_GROUPS: dict[str, Callable[[ConfigReader, Dtypes, int], list[LayerGroup]]] = {
    hf_layers.FULL: hf_groups.attention,
    hf_layers.SLIDING: hf_groups.sliding,
    hf_layers.CHUNKED: hf_groups.chunked,
    hf_layers.STATE: hf_groups.recurrent,
    hf_layers.CONV: hf_groups.short_conv,
    hf_layers.PARALLEL: hf_groups.parallel,
}
