"""The parts of a layer of vLLM's cache, from what one rank announces of it.

A rank knows its own shapes only. The shapes of the model follow from the number of ranks where vLLM
divides heads or channels evenly; where it may not have, the layer is refused, and the engine's
blocks stay those of its ranks.

Sources, vLLM 0.32: `v1/kv_cache_interface.py`, `mamba/mamba_utils.py` (shapes of states),
`mamba/gdn/qwen_gdn_linear_attn.py` (q, k, v), `mamba/mamba_mixer2.py` (x, B, C),
`offloading/canonical_mapping.py` (order of heads and tokens in a page), `v1/worker/utils.py`
(kernel blocks), `sparse_attn_indexer.py` (values of all tokens of a kernel block before their
scales).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from prfaas.core.kv.canonical.parts import LayerPart, LayerParts, Section, Strip
from prfaas.core.kv.canonical.shards import divides

BESIDE_VALUES = "beside values"
"""Key and value of a token lie side by side, as on GPUs."""
BY_DIMENSION = "by dimension"
"""All keys, dimension by dimension, then all values, as in vLLM's vector code for CPUs."""


class CannotConvertError(ValueError):
    """A layer whose bytes cannot be told apart from those of its rank; its text is the reason."""


_ROWS_OF_TOKENS = frozenset(
    {None, "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"}
)
"""Types of a latent that has the bytes of each token side by side."""


class KernelPages(msgspec.Struct, frozen=True):
    """The order of a layer's pages, as the rank that holds them sees it."""

    pieces: int
    """Kernel blocks of a page. An attention backend that cannot read a page as a whole has it as so
    many blocks of its own, one after the other, each with a run of the tokens."""
    order: str
    """Axes of a kernel block, outermost first: heads `H`, tokens `N`, content `C`; those of length
    1 are left out."""

    @property
    def words(self) -> str:
        """Both."""
        return f"{self.pieces} kernel blocks in the order {self.order}"

    def words_of(self, spec: Any) -> str:
        """Everything that determines the order of the bytes in a page of a layer.

        Args:
            spec: vLLM's description of the layer.
        """
        if _is_latent(spec):
            return "rows of tokens" if _has_rows_of_tokens(spec) else self.words
        return self.words if self.order.startswith("H") else "rows of tokens"


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model among the ranks of an engine."""

    tp_size: int
    """Ranks of tensor parallelism."""
    kv_heads: int
    """KV heads of the whole model."""
    cache_layout: str | None
    """Physical order of the cache, such as `LBNHC`; None if vLLM has none."""
    state_groups: int | None = None
    """Groups of Mamba-2's B and C in the whole model; None if it has none."""
    num_pages: int = 1
    """Pages of attention that make a block; their tokens follow each other."""
    key_order: str = BESIDE_VALUES
    """Order of keys in a head of a head-major page."""
    pieces: int = 1
    """Kernel blocks of a page."""

    @property
    def num_runs(self) -> int:
        """Runs of tokens that make a block, each of which has its bytes in one order."""
        return self.num_pages * self.pieces


def layer_parts(spec: Any, division: Division) -> LayerParts:
    """Return the parts of a layer; CannotConvertError if the layer's kind or shape is not known
    well enough.

    Args:
        spec: vLLM's description of the layer at one rank (`KVCacheSpec`).
    """
    if hasattr(spec, "shapes"):
        return _state(spec, division)
    if not hasattr(spec, "head_size"):
        raise CannotConvertError(f"layers of kind {type(spec).__name__} are not known")
    if _is_latent(spec):
        return _latent(spec, division)
    return _attention(spec, division)


# --- attention ---


def _is_latent(spec: Any) -> bool:
    return "MLA" in type(spec).__name__


def _latent(spec: Any, division: Division) -> LayerParts:
    """Every rank holds the whole latent."""
    if spec.max_tp_shards != 1 and division.tp_size > 1 and spec.num_kv_heads != 1:
        raise CannotConvertError("a latent that ranks divide")
    if division.num_runs > 1 and division.key_order not in (BESIDE_VALUES, BY_DIMENSION):
        raise CannotConvertError(_cannot_join(division))
    num_bytes = int(spec.unpadded_page_size_bytes) * division.num_pages
    # Where a kernel block is more than a row for each token, its length is a part of the order.
    name = "latent"
    if not _has_rows_of_tokens(spec):
        name += f" in blocks of {spec.block_size // division.pieces}"
    sections = (Section(name, 1, num_bytes, (Strip(1, num_bytes),)),)
    return (LayerPart("latent", _name(spec.dtype), 1, sections),)


def _has_rows_of_tokens(spec: Any) -> bool:
    """Return True for a latent that is a row for each token, whatever kernel reads it."""
    role = getattr(getattr(spec, "cache_role", None), "name", "SPARSE")
    kind = getattr(spec, "cache_dtype_str", None)
    return role == "SPARSE" and spec.tokens_per_state == 1 and kind in _ROWS_OF_TOKENS


def _attention(spec: Any, division: Division) -> LayerParts:
    heads = _total_heads(spec.num_kv_heads, division)
    cell = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    plain = spec.num_kv_heads * spec.block_size * cell
    if spec.tokens_per_state != 1 or plain != spec.unpadded_page_size_bytes:
        raise CannotConvertError(
            f"pages of {spec.unpadded_page_size_bytes} bytes hold more than keys and values of "
            f"{spec.num_kv_heads} heads and {spec.block_size} tokens, {plain} bytes"
        )
    if spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise CannotConvertError(
            f"the attention backend has {spec.num_heads} slots of {spec.state_content_size_bytes} "
            f"bytes for a token, where {spec.num_kv_heads} heads of {cell} bytes are known"
        )
    tokens = spec.block_size * division.num_pages
    if division.cache_layout == "LBNHC":
        return (LayerPart("kv", _name(spec.dtype), tokens, (Section("kv", heads, cell),), True),)
    if division.cache_layout != "LBHNC":
        raise CannotConvertError(
            f"the order of the cache is {division.cache_layout}; heads can be told apart in "
            "LBNHC and LBHNC (VLLM_KV_CACHE_LAYOUT)"
        )
    section = Section("kv", heads, tokens * cell, _strips(spec, division, tokens))
    return (LayerPart("kv", _name(spec.dtype), 1, (section,)),)


def _strips(spec: Any, division: Division, tokens: int) -> tuple[Strip, ...]:
    """Runs over the tokens of a head."""
    width = spec.dtype.itemsize
    if division.key_order == BESIDE_VALUES:
        return (Strip(1, tokens * (spec.head_size + spec.head_size_v) * width),)
    if division.key_order == BY_DIMENSION:
        keys = Strip(spec.head_size, tokens * width)
        return keys, Strip(1, tokens * spec.head_size_v * width)
    if division.num_runs > 1:
        raise CannotConvertError(_cannot_join(division))
    return ()


def _cannot_join(division: Division) -> str:
    return (
        f"blocks of {division.num_runs} pages cannot be made of keys in the order of "
        f"{division.key_order}"
    )


def pieces_apart(spec: Any, division: Division) -> int:
    """Return the number of kernel blocks into which a page has to be taken apart.

    1 where the bytes of a page are the same whatever the kernel blocks: those with a row for each
    token, or with a single head.
    """
    if getattr(spec, "num_kv_heads", 1) == 1 and division.key_order == BESIDE_VALUES:
        return 1
    is_attention = hasattr(spec, "head_size") and not _is_latent(spec)
    return division.pieces if is_attention and division.cache_layout == "LBHNC" else 1


def _total_heads(of_rank: int, division: Division) -> int:
    if division.tp_size == 1:
        return of_rank
    total = division.kv_heads
    if divides(total, division.tp_size) and of_rank == max(1, total // division.tp_size):
        return total
    raise CannotConvertError(
        f"a layer has {of_rank} KV heads at each of {division.tp_size} ranks, the model {total}"
    )


# --- linear state ---


def _state(spec: Any, division: Division) -> LayerParts:
    if spec.tp_replicated:
        shapes = zip(spec.shapes, spec.dtypes, strict=True)
        return tuple(
            LayerPart(
                f"state{number}", _name(dtype), 1, (Section("whole", 1, _size(shape, dtype)),)
            )
            for number, (shape, dtype) in enumerate(shapes)
        )
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    known = _STATES.get(kind)
    if known is None:
        raise CannotConvertError(f"states of kind {kind} are not known")
    num_shapes, parts = known
    if len(spec.shapes) != num_shapes:
        raise CannotConvertError(f"states of kind {kind} with {len(spec.shapes)} tensors")
    return parts(spec, division)


def _delta_net(spec: Any, division: Division) -> LayerParts:
    """Gated delta net and KDA: q, k and v side by side; heads of keys and of values."""
    heads, value_size, key_size = spec.shapes[1]
    channels = _channels(spec)
    keys, rest = divmod(channels - heads * value_size, 2 * key_size)
    if rest or keys < 1:
        raise CannotConvertError(f"{channels} channels are not q, k and v of {heads} heads")
    width = spec.dtypes[0].itemsize
    sizes = [("q", keys, key_size), ("k", keys, key_size), ("v", heads, value_size)]
    sections = [Section(name, n * division.tp_size, size * width) for name, n, size in sizes]
    return _convolution(spec, sections), _heads(spec, 1, division)


def _mamba2(spec: Any, division: Division) -> LayerParts:
    """x by heads; B and C by groups, of which a single one is copied to all ranks."""
    heads, head_size, state_size = spec.shapes[1]
    channels = _channels(spec)
    groups, rest = divmod(channels - heads * head_size, 2 * state_size)
    if rest or groups < 1:
        raise CannotConvertError(f"{channels} channels are not x, B and C of {heads} heads")
    total = _total_groups(groups, division)
    width = spec.dtypes[0].itemsize
    sections = [
        Section("x", heads * division.tp_size, head_size * width),
        Section("B", total, state_size * width),
        Section("C", total, state_size * width),
    ]
    return _convolution(spec, sections), _heads(spec, 1, division)


def _total_groups(of_rank: int, division: Division) -> int:
    total, ranks = division.state_groups, division.tp_size
    if ranks == 1:
        return of_rank
    if total == of_rank == 1 or total == of_rank * ranks:
        return total
    raise CannotConvertError(
        f"B and C have {of_rank} groups at each of {ranks} ranks, the model "
        f"{'an unknown number' if total is None else total}"
    )


def _short_convolution(spec: Any, division: Division) -> LayerParts:
    width = spec.dtypes[0].itemsize
    sections = [Section("x", _channels(spec) * division.tp_size, width)]
    return (_convolution(spec, sections),)


def _mamba1(spec: Any, division: Division) -> LayerParts:
    return *_short_convolution(spec, division), _heads(spec, 1, division)


def _linear(spec: Any, division: Division) -> LayerParts:
    return (_heads(spec, 0, division),)


_STATES: Mapping[str, tuple[int, Callable[[Any, Division], LayerParts]]] = {
    "GDN_ATTN": (2, _delta_net),
    "MAMBA2": (2, _mamba2),
    "MAMBA1": (2, _mamba1),
    "SHORT_CONV": (1, _short_convolution),
    "LINEAR": (1, _linear),
}
"""By vLLM's name of the backend: number of tensors, and their parts."""


def _channels(spec: Any) -> int:
    return int(max(spec.shapes[0]))


def _convolution(spec: Any, sections: list[Section]) -> LayerPart:
    """Kept steps, each with all channels; or channels, each with all steps.

    A convolution keeps a few steps, and has more channels than that.
    """
    steps = int(min(spec.shapes[0]))
    if spec.shapes[0][0] != steps:
        sections = [Section(s.name, s.units, s.unit_bytes * steps) for s in sections]
        steps = 1
    return LayerPart("conv", _name(spec.dtypes[0]), steps, tuple(sections))


def _heads(spec: Any, number: int, division: Division) -> LayerPart:
    """A tensor whose first axis is divided."""
    (units, *shape), dtype = spec.shapes[number], spec.dtypes[number]
    section = Section("state", units * division.tp_size, _size(shape, dtype))
    return LayerPart("state", _name(dtype), 1, (section,))


def _size(shape: Any, dtype: Any) -> int:
    num_bytes = int(dtype.itemsize)
    for length in shape:
        num_bytes *= length
    return num_bytes


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
