"""JSON in and out of the gateway."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

import msgspec

from prfaas.gateway.http.token_ids_json import ids_to_json

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
    """The value in `data`.

    Raises:
        ValueError: `data` is no strict JSON in UTF-8, or nests too deeply.
    """
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
