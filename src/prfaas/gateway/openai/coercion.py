"""Values in the other forms in which vLLM reads them: 5.0, "5" and true are integers there.

Only a body that has other types than its fields is looked at. The rules are those of Pydantic, by
which vLLM reads a body as well.
"""

from __future__ import annotations

import math
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.fields import ChatFields, CompletionFields, types_of

_LAX: dict[Any, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (bool, int, float, list[int])
}
_PROMPTS: TypeAdapter[Any] = TypeAdapter(list[int] | list[list[int]])


def _plain(kind: Any) -> Any:
    """A type without `None` and annotations; None for a union."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        parts = [part for part in get_args(kind) if part is not NoneType]
        if get_origin(kind) is not Annotated and len(parts) > 1:
            return None
        kind = parts[0]
    return kind


_READERS = {
    fields: {
        name: _LAX[plain]
        for name, kind in types_of(fields).items()
        if (plain := _plain(kind)) in _LAX
    }
    for fields in (ChatFields, CompletionFields)
}


def coerced(body: JsonObject, fields: type[ChatFields | CompletionFields]) -> JsonObject:
    """A body with its numbers and truth values as such; what is none stays as it is."""
    readers = _READERS[fields]
    return {
        name: _read(readers[name], value) if name in readers else value
        for name, value in body.items()
    }


def token_lists(value: object) -> list[list[int]] | None:
    """Token ids of one prompt or of several; None if these are not token ids alone."""
    ids = _read(_PROMPTS, value)
    if ids is value or not ids:
        return None
    return ids if isinstance(ids[0], list) else [ids]


def _read(reader: TypeAdapter[Any], value: object) -> Any:
    try:
        read = reader.validate_python(value)
    except ValidationError:
        return value
    # JSON has no infinity: it would become null on its way to the engine.
    return value if isinstance(read, float) and not math.isfinite(read) else read
