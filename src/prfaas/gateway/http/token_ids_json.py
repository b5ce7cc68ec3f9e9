"""Token ids as JSON, all of a prompt at once."""

from __future__ import annotations

from array import array
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt

TABLE_BITS = 18, 20
"""Ids of so many bits have their texts in a table: of most vocabularies, and of all."""
TEXT_BYTES = 8
"""Size of each text in a table: seven digits and a comma.

Numpy gathers words faster than odd sizes.
"""


def make_ready(num_ids: int) -> None:
    """Make the table that ids below `num_ids` need, which takes some 20 ms."""
    _table_for(num_ids - 1)


def ids_to_json(ids: array[int]) -> bytes:
    """An array of integers. Short ones have spaces before them, as JSON allows.

    Args:
        ids: Unsigned, of 32 bits.
    """
    if not ids:
        return b"[]"
    numbers = np.frombuffer(ids, np.uint32)
    table = _table_for(int(numbers.max()))
    if table is None:
        return msgspec.json.encode(ids.tolist())
    texts = table.take(numbers).view(np.uint8).data
    return b"".join((b"[", texts[:-1], b"]"))


def _table_for(highest: int) -> npt.NDArray[np.uint64] | None:
    bits = next((bits for bits in TABLE_BITS if highest >> bits == 0), None)
    return None if bits is None else _texts(bits)


@cache
def _texts(bits: int) -> npt.NDArray[np.uint64]:
    """The text of every number below 2^bits and a comma, all of one width."""
    rest = np.arange(1 << bits, dtype=np.uint32)
    texts = np.full((len(rest), TEXT_BYTES), ord(" "), np.uint8)
    texts[:, -1] = ord(",")
    for column in reversed(range(TEXT_BYTES - 1)):
        shown = (rest > 0) | (column == TEXT_BYTES - 2)
        texts[:, column] = np.where(shown, rest % 10 + ord("0"), ord(" "))
        rest //= 10
    return texts.view(np.uint64)[:, 0]
