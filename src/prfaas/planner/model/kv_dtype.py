"""Bytes that one vector of keys or values takes in each KV cache format.

A format is either dense (every element costs the same) or carries scales. The scaled formats are
the ones vLLM 0.32 stores: one fp32 scale after each head's keys and one after its values
(`vllm/v1/attention/backends/triton_attn.py`, `customize_spec`), NVFP4 with one fp8 scale per 16
elements, and FlashMLA's packed latent (`fp8_ds_mla`).
"""

from __future__ import annotations

from collections.abc import Callable

from prfaas.errors import ConfigError

_PER_HEAD_SCALE_BYTES = 4  # one fp32 per token and head, for K and for V
_NVFP4_SCALED_ELEMENTS = 16  # elements that share one fp8 scale
_DS_MLA_SCALED_ELEMENTS = 128  # latent elements that share one fp32 scale

_ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def _half(num_elements: int) -> int:
    if num_elements % 2:
        raise ConfigError(
            f"a 4-bit KV cache packs two elements into a byte, but the head has {num_elements} "
            "elements; choose an 8- or 16-bit KV dtype"
        )
    return num_elements // 2


_SCALED: dict[str, Callable[[int], int]] = {
    "int8_per_token_head": lambda n: n + _PER_HEAD_SCALE_BYTES,
    "fp8_per_token_head": lambda n: n + _PER_HEAD_SCALE_BYTES,
    "int4_per_token_head": lambda n: _half(n) + _PER_HEAD_SCALE_BYTES,
    "nvfp4": lambda n: _half(n) + -(-n // _NVFP4_SCALED_ELEMENTS),
}

KV_DTYPES: tuple[str, ...] = (*_ELEMENT_BYTES, *_SCALED, "fp8_ds_mla")


def canonical_dtype(name: str) -> str:
    """The name this package uses for a dtype: "bf16" and "torch.bfloat16" give "bfloat16"."""
    bare = name.removeprefix("torch.")
    return _ALIASES.get(bare, bare)


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dense dtype, as recurrent states use them.

    Raises:
        ConfigError: The dtype is unknown or carries scales.
    """
    try:
        return _ELEMENT_BYTES[canonical_dtype(dtype)]
    except KeyError:
        known = ", ".join(_ELEMENT_BYTES)
        raise ConfigError(f"dtype {dtype!r} is not one of {known}") from None


def vector_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of one head's keys (or values, or latent) of one token, scales included.

    Args:
        num_elements: Length of the vector, at least 1.
        dtype: One of `KV_DTYPES` or an alias such as "bf16".

    Raises:
        ConfigError: The dtype is unknown or cannot hold a vector of this length.
    """
    name = canonical_dtype(dtype)
    if name in _SCALED:
        return _SCALED[name](num_elements)
    if name in _ELEMENT_BYTES:
        return num_elements * _ELEMENT_BYTES[name]
    raise ConfigError(f"KV dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}")


def mla_vector_bytes(kv_lora_rank: int, rope_dim: int, dtype: str) -> int:
    """Bytes of one token's latent and rope key in one MLA layer.

    `fp8_ds_mla` keeps the rope part in bf16 and one fp32 scale per 128 latent elements: 656 B for
    512 + 64 (vLLM, `mla_attention.py`). Every other format treats both parts as one vector.
    """
    if dtype == "fp8_ds_mla":
        scales = -(-kv_lora_rank // _DS_MLA_SCALED_ELEMENTS) * 4
        return kv_lora_rank + scales + 2 * rope_dim
    return vector_bytes(kv_lora_rank + rope_dim, dtype)
