"""Typed values of a request body; every error has the field, the value and the limit."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from prfaas.errors import RequestError

SHOWN_CHARS = 80
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "an array",
    "object": "an object",
}
_KIND = re.compile("|".join(_WORDS))
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def bad(message: str, param: str | None = None) -> RequestError:
    """A 400."""
    return RequestError(message, param=param)


def shown(value: object) -> str:
    """A value for an error message, cut to a bearable length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def typed(value: object, kind: Any, place: str = "") -> Any:
    """A decoded JSON value as a type of `msgspec`.

    Args:
        kind: The type; JSON's integers count as numbers, its true and false do not.
        place: Field that has the value; "" for the whole body.

    Raises:
        RequestError: 400, naming the field, its value and what it must be.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), value, place) from None


def _refusal(said: str, value: Any, place: str) -> RequestError:
    """An error of `msgspec` in the words of this API."""
    said, _, path = said.partition(" - at `$")
    for name, index in _STEP.findall(path):
        place += f".{name}" if name else f"[{index}]"
        value = value[name or int(index)]
    place, said = place.removeprefix("."), said.replace("`", "")
    param = re.split(r"[.\[]", place, maxsplit=1)[0]
    if (missing := said.removeprefix("Object missing required field ")) != said:
        return bad(f"{place}.{missing} must be given", param)
    said = said.partition(", got ")[0].replace("Expected", "must be").replace(" | null", "")
    said = _KIND.sub(lambda kind: _WORDS[kind[0]], said).replace(" | ", " or ")
    return bad(f"{place} {said}, got {shown(value)}", param)
