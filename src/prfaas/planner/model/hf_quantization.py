"""KV cache format that a quantised checkpoint asks for in its `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from prfaas.limited_files import read_json
from prfaas.planner.model.hf_reader import ConfigReader

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
    """Add the `hf_quant_config.json` beside a `config.json` that has no `quantization_config`.

    ModelOpt before 0.31 wrote that file; engines read it.

    Args:
        config: The parsed `config.json`; changed in place.

    Raises:
        ConfigError: The file is there and cannot be read.
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
