"""KV caches of a prefix as bits, and what codecs make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prfaas.core.codec.codecs import CodedSegment, Form, Quality, SegmentMode
from prfaas.pool.codec.rounding import round_block

Bits = NDArray[np.uint16]
States = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache of one layer for a prefix.

    Attributes:
        keys: bfloat16 as bits: heads, tokens, size of a key; None for a layer without attention.
    """

    keys: Bits | None = None
    values: Bits | None = None
    states: tuple[States, ...] = ()


Change = Callable[[LayerCache], LayerCache]
"""Change that an arm of the comparison makes to the cache of a layer."""


def unchanged(layer: LayerCache) -> LayerCache:
    """Return the cache as it is."""
    return layer


def zeroed(layer: LayerCache) -> LayerCache:
    """Return a cache that holds nothing: the control."""
    return LayerCache(
        None if layer.keys is None else np.zeros_like(layer.keys),
        None if layer.values is None else np.zeros_like(layer.values),
        tuple(np.zeros_like(state) for state in layer.states),
    )


def rounded(quality: Quality, block_tokens: int) -> Change:
    """Return what a link does to blocks of a class.

    Args:
        block_tokens: Tokens of a block, as engines cut them.
    """

    def change(layer: LayerCache) -> LayerCache:
        found = layer
        if layer.keys is not None and layer.values is not None:
            found = _attention(layer, quality, block_tokens)
        if quality.rounds_state:
            found = replace(found, states=tuple(_state(state) for state in layer.states))
        return found

    return change


def _attention(layer: LayerCache, quality: Quality, block_tokens: int) -> LayerCache:
    keys, values = layer.keys, layer.values
    if keys is None or values is None or quality.attention is Quality.LOSSLESS:
        return layer
    cells = np.concatenate([keys, values], axis=-1)
    for start in range(0, cells.shape[1], block_tokens):
        some = np.ascontiguousarray(cells[:, start : start + block_tokens])
        heads, tokens, size = some.shape
        sizes = tokens, heads, keys.shape[-1], values.shape[-1]
        segment = CodedSegment(SegmentMode.KIVI4, sizes)
        if quality.attention is Quality.FP8:
            segment = CodedSegment(SegmentMode.FP8, (heads * tokens * size, 0, 0, 0))
        back = np.frombuffer(_back(Form((segment,)), some.tobytes()), np.uint16)
        cells[:, start : start + block_tokens] = back.reshape(some.shape)
    return replace(layer, keys=cells[..., : keys.shape[-1]], values=cells[..., keys.shape[-1] :])


def _state(state: States) -> States:
    form = Form((CodedSegment(SegmentMode.STATE, (state.size, 0, 0, 0)),))
    return np.frombuffer(_back(form, state.tobytes()), np.float32).reshape(state.shape)


def _back(form: Form, data: bytes) -> bytearray:
    """Return what a block decodes to at the receiver."""
    into = bytearray(len(data))
    round_block(form, memoryview(data), memoryview(into))
    return into
