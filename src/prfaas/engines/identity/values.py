"""Values of vLLM's configuration as facts: short, the same in every process, free of paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import blake3

from prfaas.core.kv.blocks import NAME_CHARS_MAX, VALUE_CHARS_MAX

_PATH = re.compile(r"(^|[\s\"'=,:\[({])(~|\.{1,2}|[A-Za-z]:)?[/\\]|://")
_NAME = re.compile(r"[^A-Za-z0-9_.\-]")


def text_of(value: Any) -> str:
    """Return a value as a fact's text. What is long, or may be a path, is sent as its digest."""
    text = value if isinstance(value, str) else _json(value).strip('"')
    text = text.removeprefix("torch.")
    if len(text) > VALUE_CHARS_MAX or _PATH.search(text) or not _is_plain(text):
        return digest(text)
    return text


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def words_of(text: str) -> str:
    """Return a name for people: plain and not too long."""
    kept = "".join(letter if _is_plain(letter) else "?" for letter in text)
    return kept[:VALUE_CHARS_MAX]


def digest(value: Any) -> str:
    """Return a digest of plain data."""
    return f"blake3:{blake3.blake3(_json(value).encode()).hexdigest()[:32]}"


def name_of(name: str) -> str:
    """Return a name as a fact's name: short, of letters, digits and `._-`."""
    if len(name) > NAME_CHARS_MAX or _NAME.search(name):
        tail = blake3.blake3(name.encode()).hexdigest()[:16]
        name = f"{_NAME.sub('_', name)[: NAME_CHARS_MAX - 17]}.{tail}"
    return name


def flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with dotted names; lists stay whole."""
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: getattr(value, name) for name in fields}
    return str(value)
