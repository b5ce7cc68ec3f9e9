"""KV caches of a prefix as bits, and what codecs make of them.

Texts whose continuation needs the prefix, as token ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prfaas.core.codec.codecs import CodedSegment, Form, Quality, SegmentMode
from prfaas.errors import ConfigError
from prfaas.pool.codec.rounding import round_block

Bits = NDArray[np.uint16]
States = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache of one layer for a prefix."""

    keys: Bits | None = None
    """bfloat16 as bits: heads, tokens, size of a key; None for a layer without attention."""
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


@dataclass(frozen=True, slots=True)
class TaskSample:
    """A prefix, which is cached, and what follows it."""

    prefix: Sequence[int]
    rest: Sequence[int]
    """Token ids that follow; the first is given, the others are predicted."""
    asked: Sequence[int]
    """Indices in `rest` that the prefix determines, at least 1 each."""


def recall(vocab: Sequence[int], num_pairs: int, num_asked: int, seed: int) -> TaskSample:
    """Return pairs of a key and a value, then some keys, each with its value to be recalled;
    ConfigError if the vocabulary has fewer keys.

    Args:
        vocab: Token ids to draw from; the first half are keys.
        num_pairs: Pairs in the prefix; keys are different.
    """
    half = len(vocab) // 2
    if not 1 <= num_asked <= num_pairs <= half:
        raise ConfigError(
            f"recall asks for {num_asked} of {num_pairs} pairs, and {len(vocab)} tokens have "
            f"{half} keys; use fewer"
        )
    dice = random.Random(seed)  # noqa: S311 (not secret)
    pairs = [(key, dice.choice(vocab[half:])) for key in dice.sample(vocab[:half], num_pairs)]
    rest = [token for pair in dice.sample(pairs, num_asked) for token in pair]
    return TaskSample([token for pair in pairs for token in pair], rest, range(1, len(rest), 2))


def copying(vocab: Sequence[int], num_tokens: int, seed: int) -> TaskSample:
    """Return random tokens, and the same again: all but the first are determined."""
    dice = random.Random(seed)  # noqa: S311 (not secret)
    tokens = [dice.choice(vocab) for _ in range(num_tokens)]
    return TaskSample(tokens, tokens, range(1, num_tokens))


def later_chunks(tokens: Sequence[int], prefix: int, rest: int, num: int) -> list[TaskSample]:
    """Return chunks of a text, each split into a prefix and what follows; ConfigError if the text
    is shorter than one chunk."""
    size = prefix + rest
    starts = range(0, len(tokens) - size + 1, size)[:num]
    if not starts:
        raise ConfigError(f"the text has {len(tokens)} tokens, and a chunk has {size}")
    return [
        TaskSample(tokens[at : at + prefix], tokens[at + prefix : at + size], range(1, rest))
        for at in starts
    ]
