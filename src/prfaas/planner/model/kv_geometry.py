"""Formats and sizes of a model's KV cache.

A format is either dense (every element costs the same) or carries scales. The scaled formats are
the ones vLLM 0.32 stores: one fp32 scale after each head's keys and one after its values
(`vllm/v1/attention/backends/triton_attn.py`, `customize_spec`), NVFP4 with one fp8 scale per 16
elements, and FlashMLA's packed latent (`fp8_ds_mla`).

The size of a sequence's cache, S_kv(l), is exact in integers. A model is a list of *layer groups*.
A group either grows with the prompt (full attention, MLA, indexer keys), grows up to a window
(sliding or chunked attention), or is a state of fixed size (linear and recurrent layers, short
convolutions). S_kv is the sum over groups, which is all the throughput model needs to know about an
architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from prfaas.core.codec.gain import PlannedCodedLink
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
    """Bytes of one element of a dense dtype, as recurrent states use them; ConfigError if the dtype
    is unknown or carries scales."""
    try:
        return _ELEMENT_BYTES[canonical_dtype(dtype)]
    except KeyError:
        known = ", ".join(_ELEMENT_BYTES)
        raise ConfigError(f"dtype {dtype!r} is not one of {known}") from None


def vector_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of one head's keys (or values, or latent) of one token, scales included; ConfigError if
    the dtype is unknown or cannot hold a vector of this length.

    Args:
        num_elements: Length of the vector, at least 1.
        dtype: One of `KV_DTYPES` or an alias such as "bf16".
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


FloatArray = npt.NDArray[np.float64]


class LayerKind(StrEnum):
    """Growth of a layer's cache with the prompt."""

    FULL = "full attention"
    MLA = "MLA"
    SLIDING = "sliding window"
    INDEXER = "sparse-attention indexer"
    LINEAR = "linear / recurrent state"
    SHORT_CONV = "short convolution"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose caches have the same size and behave the same way."""

    kind: LayerKind
    """How the cache grows."""
    num_layers: int
    """Layers in the group, at least 1."""
    token_bytes: int = 0
    """Bytes per token in one layer; 0 for a pure state."""
    state_bytes: int = 0
    """Bytes per sequence in one layer that do not depend on its length."""
    window: int | None = None
    """Tokens kept at most; None keeps all."""
    detail: str = ""
    """The shape in words, for people."""

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens of a prompt of `num_tokens` whose keys the group still holds."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def kept_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that hold `kept_tokens`; a window may straddle one block more than it fills."""
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1) // block_size) + 1)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of all layers of the group for one sequence."""
        per_layer = self.token_bytes * self.kept_tokens(num_tokens) + self.state_bytes
        return self.num_layers * per_layer


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The KV cache of one model."""

    name: str
    """Model name, for people."""
    groups: tuple[LayerGroup, ...]
    """At least one layer group."""
    kv_dtype: str = "bfloat16"
    """Format of keys, values and latents."""
    state_dtype: str = "bfloat16"
    """Format of recurrent states."""

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token adds to a prompt longer than every window."""
        return sum(g.num_layers * g.token_bytes for g in self.groups if g.window is None)

    @property
    def has_pages(self) -> bool:
        """Return True if all that grows with the prompt is keys and values; latents are neither."""
        grows = (group.kind for group in self.groups if group.token_bytes)
        return not {LayerKind.MLA, LayerKind.INDEXER} & set(grows)

    @property
    def state_bytes(self) -> int:
        """Bytes of all fixed-size states of one sequence."""
        return sum(g.num_layers * g.state_bytes for g in self.groups)


def kv_bytes(geometry: KvGeometry, num_tokens: int) -> int:
    """Bytes of KV cache that prefill hands to decode for one sequence, S_kv(l).

    Args:
        geometry: Layer groups of the model.
        num_tokens: Prompt length, tokens; at least 1.

    Returns:
        Bytes before block rounding, compression and framing.

    Raises:
        ValueError: `num_tokens` is below 1.

    References:
        arXiv:2604.15039, S_kv of equation (1).
    """
    _check_tokens(num_tokens)
    return sum(group.num_bytes(num_tokens) for group in geometry.groups)


def kv_bytes_at(geometry: KvGeometry, num_tokens: FloatArray) -> FloatArray:
    """`kv_bytes` for an array of lengths, which may be fractional as mean lengths are.

    Args:
        geometry: Layer groups of the model.
        num_tokens: Lengths in tokens, any shape.

    Returns:
        Bytes, same shape; exact below 2**53.
    """
    total = np.full_like(num_tokens, float(geometry.state_bytes), dtype=np.float64)
    for group in geometry.groups:
        kept = num_tokens if group.window is None else np.minimum(num_tokens, group.window)
        total += float(group.num_layers * group.token_bytes) * kept
    return total


def attention_share(geometry: KvGeometry, num_tokens: float) -> float:
    """Return the share, in [0, 1], of the bytes of a sequence that grow with its tokens."""
    whole = float(kv_bytes_at(geometry, np.array([num_tokens]))[0])
    return 1 - geometry.state_bytes / whole if whole else 1.0


def wire_bytes_at(
    geometry: KvGeometry, num_tokens: FloatArray, link: PlannedCodedLink
) -> FloatArray:
    """Bytes on the network for the `kv_bytes_at` of some lengths.

    Args:
        geometry: Layer groups of the model.
        num_tokens: Lengths in tokens, any shape.
        link: The link that carries them.
    """
    whole = kv_bytes_at(geometry, num_tokens)
    if not link.is_coding:
        return whole
    state = geometry.state_bytes
    coded_state = state / link.state_ratio(geometry.state_dtype)
    return (whole - state) / link.attention_ratio(geometry.kv_dtype) + coded_state


def block_kv_bytes(geometry: KvGeometry, num_tokens: int, block_size: int) -> int:
    """`kv_bytes` when token-wise groups are stored in whole blocks of `block_size` tokens;
    ValueError if `num_tokens` or `block_size` is below 1.

    States are stored once per sequence at their own, unpadded size; `state_page_bytes` gives the
    padded one.
    """
    _check_tokens(num_tokens)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it has to be at least 1 token")
    total = geometry.state_bytes
    for group in geometry.groups:
        blocks = group.kept_blocks(num_tokens, block_size)
        total += group.num_layers * group.token_bytes * blocks * block_size
    return total


def shipped_kv_bytes(geometry: KvGeometry, num_tokens: int, block_size: int) -> int:
    """Bytes of the blocks that prefill ships for a prompt of which decode holds nothing; ValueError
    if `num_tokens` or `block_size` is below 1.

    Decode resumes where the last block ends before the prompt's last token. Shipped are the blocks
    up to there, of windows those that end in the last one, and one state of each linear layer.
    """
    _check_tokens(num_tokens)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it has to be at least 1 token")
    num_blocks = (num_tokens - 1) // block_size
    if not num_blocks:
        return 0
    total = geometry.state_bytes
    for group in geometry.groups:
        kept = num_blocks
        if group.window is not None:
            # The next token is in its window, too.
            kept = min(kept, -(-max(group.window - 1, 1) // block_size))
        total += group.num_layers * group.token_bytes * kept * block_size
    return total


def page_bytes(group: LayerGroup, block_size: int) -> int:
    """Bytes of one block (or one state) of one layer of a group, without padding."""
    return group.token_bytes * block_size + group.state_bytes


def padded_page_bytes(geometry: KvGeometry, block_size: int) -> int:
    """Bytes of the page that all layers share when an engine keeps them in one block pool.

    vLLM makes every page as large as the largest one: a state is padded to the attention page
    (`mamba_page_size_padded`).

    Args:
        geometry: Layer groups of the model.
        block_size: Tokens in a block, at least 1.
    """
    return max(page_bytes(group, block_size) for group in geometry.groups)


def hybrid_block_size(geometry: KvGeometry, alignment: int) -> int:
    """Smallest block, in tokens, whose attention page is not smaller than any state.

    This is the rule of vLLM's `_align_hybrid_block_size`.

    Args:
        geometry: A model with token-wise groups.
        alignment: The block is a multiple of this number of tokens, as the engine's kernels
            require.

    Returns:
        A multiple of `alignment`; `alignment` itself for a model without states.
    """
    state = max(group.state_bytes for group in geometry.groups)
    token = min((g.token_bytes for g in geometry.groups if g.token_bytes), default=0)
    if not state or not token:
        return alignment
    return alignment * -(-state // (alignment * token))


def _check_tokens(num_tokens: int) -> None:
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; a prompt has at least 1 token")
