"""JSON in and out of the gateway; the token ids of a prompt at once."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from functools import cache
from typing import Any

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


def ids_to_json(ids: array[int]) -> bytes | memoryview:
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
    words = np.empty(1 + len(numbers), np.uint64)
    # Without a cast or a check of each index on the way, it takes a quarter of the time.
    table.take(numbers.astype(np.intp), out=words[1:], mode="clip")
    texts = words.view(np.uint8)
    texts[TEXT_BYTES - 1], texts[-1] = b"[]"
    return texts[TEXT_BYTES - 1 :].data


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


JsonObject = dict[str, Any]
"""A JSON object of somebody else's making: a request body, an engine's answer."""

_CONTAINERS = {dict, list}


def _written(value: object) -> msgspec.Raw:
    if isinstance(value, array):
        return msgspec.Raw(ids_to_json(value))
    raise TypeError(f"{type(value).__name__} is no JSON")


_encoder = msgspec.json.Encoder(enc_hook=_written)


def to_json(value: object) -> bytes:
    """UTF-8 JSON, compact but for token ids in an `array`."""
    return _encoder.encode(value)


def from_json(data: bytes) -> Any:
    """The value in `data`; ValueError if `data` is no strict JSON in UTF-8, or nests too deeply."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def as_object(value: object) -> JsonObject:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_count(value: object) -> int:
    """`value` if it is a non-negative integer, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def num_opened(data: bytes) -> int:
    """Brackets and braces that open in a text, within strings or not."""
    # They are one bit apart.
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) | 0x20 == ord("{")))


def num_containers(data: bytes) -> int:
    """Arrays and objects that a JSON text can have at most; exact if it is valid."""
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return sum(map(_num_opened, unescaped.split(b'"')[::2]))


def _num_opened(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def is_deeper_than(value: object, levels_max: int) -> bool:
    """Return True if arrays and objects nest more than `levels_max` deep."""
    level = _containers([value])
    for _ in range(levels_max):
        if not level:
            return False
        level = [child for parent in level for child in _children(parent)]
    return bool(level)


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return _containers(value.values())
    return _containers(value) if isinstance(value, list) else []


def _containers(values: Collection[object]) -> list[object]:
    if _CONTAINERS.isdisjoint(map(type, values)):
        return []
    return [value for value in values if isinstance(value, (dict, list))]
