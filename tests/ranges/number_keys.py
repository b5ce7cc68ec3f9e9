"""Numeric keys of a file's tables, found in their types, and values at the edge for each."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator

Key = tuple[str | int, ...]
NUMBERS = (0, -1, 1, 2**70, 1e300, 1e-300, float("nan"), float("inf"))
"""Values of a key that is a number."""
_UNITS = {"dur": "h", "sec": "h", "rate": "Tbps", "bits": "Tbps", "size": "TiB", "bytes": "TiB"}
_LEAST = {"h": "ns", "Tbps": "bps", "TiB": "B"}


def number_keys(model: type[BaseModel], tables: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Keys of numbers, with the unit of those that are text, else "".

    Args:
        model: The file's type.
        tables: A file; tables in lists and mappings are those that it has, and one "x" besides.
    """
    for name, field in model.model_fields.items():
        wrapped = Annotated[field.annotation, *field.metadata] if field.metadata else None
        for key, unit in _of(wrapped or field.annotation, tables.get(name)):
            yield (name, *key), unit


def _of(annotation: Any, value: Any, unit: str = "") -> Iterator[tuple[Key, str]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        units = [_unit(each) for each in metadata if isinstance(each, BeforeValidator)]
        yield from _of(inner, value, next(filter(None, units), unit))
    elif origin in (Union, types.UnionType):
        seen: set[tuple[Key, str]] = set()
        for option in get_args(annotation):
            seen |= set(_of(option, value, unit))
        yield from sorted(seen, key=str)
    elif origin in (list, tuple):
        items = value if isinstance(value, list) else []
        for i, item in enumerate(items[:1]):
            yield from (((i, *key), u) for key, u in _of(get_args(annotation)[0], item, unit))
    elif origin is dict:
        known = value if isinstance(value, dict) else {}
        for name, item in list(known.items())[:1]:
            yield from (((name, *key), u) for key, u in _of(get_args(annotation)[1], item, unit))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from number_keys(annotation, value if isinstance(value, dict) else {})
    elif annotation in (int, float):
        yield (), unit


def _unit(validator: BeforeValidator) -> str:
    name = getattr(validator.func, "__name__", "")
    return next((unit for word, unit in _UNITS.items() if word in name), "")


def values(unit: str) -> tuple[Any, ...]:
    """Values at the edge for a key with this unit."""
    if not unit:
        return NUMBERS
    return (f"0{unit}", f"1{_LEAST[unit]}", f"{10**18 - 1}{unit}", f"-1{unit}", "", f"nan{unit}", 1)


def setting(key: Key, value: Any) -> str:
    """The change of one key, as `--set` takes it."""
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    return f"{'.'.join(map(str, key))}={shown}"
