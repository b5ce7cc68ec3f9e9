"""KV cache format that a quantised checkpoint asks for in its `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.errors import ConfigError
from prfaas.planner.model.hf_reader import ConfigReader

_BY_NAME = {"fp8": "fp8", "nvfp4": "nvfp4"}
_BY_BITS = {8: "fp8", 4: "nvfp4"}


def quantized_kv_dtype(config: ConfigReader) -> str | None:
    """The format an engine takes for `--kv-cache-dtype auto`, or None for the model's own dtype.

    Raises:
        ConfigError: The checkpoint names a format that is not known here.

    References:
        vLLM 0.32, `get_kv_cache_quant_algo_string` (ModelOpt) and `Attention.__init__`
        (compressed-tensors: a `kv_cache_scheme` means fp8).
    """
    outer = config.table("quantization_config")
    inner = outer.get("quantization")
    tables = [inner, outer] if isinstance(inner, Mapping) else [outer]
    for field in ("kv_cache_scheme", "kv_cache_quant_algo"):
        for table in tables:
            asked = table.get(field)
            if asked:
                return _format(config, field, asked)
    return None


def _format(config: ConfigReader, field: str, asked: object) -> str | None:
    if isinstance(asked, Mapping):
        known = _BY_BITS.get(asked.get("num_bits", 0)) if asked.get("type") == "float" else None
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
