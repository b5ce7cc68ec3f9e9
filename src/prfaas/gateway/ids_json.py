"""Token ids as JSON, all of a prompt at once."""

from __future__ import annotations

from array import array
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt

BITS_MIN, BITS_MAX = 12, 20
"""Ids of so many bits have their texts in a table; no vocabulary is larger."""


def ids_to_json(ids: array[int]) -> bytes:
    """An array of integers. Short ones have spaces before them, as JSON allows.

    Args:
        ids: Unsigned, of 32 bits.
    """
    if not ids:
        return b"[]"
    numbers = np.frombuffer(ids, np.uint32)
    bits = int(numbers.max()).bit_length()
    if bits > BITS_MAX:
        return msgspec.json.encode(ids.tolist())
    return b"[" + _texts(max(bits, BITS_MIN)).take(numbers).tobytes()[:-1] + b"]"


@cache
def _texts(bits: int) -> npt.NDArray[np.void]:
    """The text of every number below 2^bits and a comma, all of one width."""
    rest = np.arange(1 << bits, dtype=np.uint32)
    width = len(str(len(rest) - 1))
    texts = np.full((len(rest), width + 1), ord(","), np.uint8)
    for column in reversed(range(width)):
        shown = (rest > 0) | (column == width - 1)
        texts[:, column] = np.where(shown, rest % 10 + ord("0"), ord(" "))
        rest //= 10
    return texts.view(f"V{width + 1}")[:, 0]
