"""Reading a deployment file, with errors an operator can act on."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from prfaas.config.deployment import Deployment
from prfaas.config.names import PATTERNS
from prfaas.errors import ConfigError

_KEYS = frozenset({"keys", "operator_keys"})


def load_deployment(path: Path, overlay: Path | None = None) -> Deployment:
    """Read and check a deployment file. Relative paths in it start at the working directory.

    Args:
        path: The file.
        overlay: A file of the same form whose keys take precedence, such as the settings that
            `prfaas plan --emit` writes.

    Raises:
        ConfigError: A file can not be read, is no TOML, or breaks a rule; the message has one
            line for every problem.
    """
    tables = _read(path)
    if overlay is not None:
        tables = _merged(tables, _read(overlay))
    if nuls := list(_nuls(tables)):
        raise ConfigError("\n  ".join([f"{path}:", *nuls]))
    try:
        return Deployment.model_validate(tables)
    except ValidationError as error:
        problems = "\n  ".join(_problem(entry) for entry in error.errors())
        raise ConfigError(f"{path}:\n  {problems}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables of both; where both have a key, tables are merged and other values are `above`'s."""
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[key] = _merged(known, value)
        else:
            merged[key] = value
    return merged


def _nuls(value: object, place: str = "") -> Iterator[str]:
    """A line for every text with a NUL, which ends names of files, arguments and variables."""
    if isinstance(value, str) and "\0" in value:
        yield f"{place}: {value!r} holds a NUL character; no path, argument or name can, remove it"
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _nuls(each, f"{place}.{number}")
    elif isinstance(value, dict):
        for key, each in value.items():
            inner = f"{place}.{key}".lstrip(".")
            if "\0" in key:
                yield f"{inner!r}: the key holds a NUL character; remove it"
            yield from _nuls(each, inner)


def _problem(entry: Any) -> str:
    place = ".".join(str(step) for step in entry["loc"] if step != "[key]")
    if entry["type"] == "extra_forbidden":
        *table, key = entry["loc"]
        nearest = difflib.get_close_matches(str(key), known_keys(table), n=1, cutoff=0.0)
        return f"{place}: unknown key; the nearest valid one is {nearest[0]!r}"
    if entry["type"] == "missing":
        return f"{place}: is required"
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "string_pattern_mismatch":
        pattern = entry["ctx"]["pattern"]
        message = f"has to be {PATTERNS.get(pattern, 'of another form')}"
    if _KEYS.intersection(map(str, entry["loc"])):
        # Somebody may have written the key itself.
        return f"{place}: {message.removeprefix('Value error, ')}"
    shown = f", got {entry['input']!r}" if isinstance(entry["input"], (str, int, float)) else ""
    return f"{place or 'file'}: {message}{shown if 'Value error' not in entry['msg'] else ''}"


def known_keys(table: list[str | int]) -> list[str]:
    """Keys that the table at this place of a deployment file may have."""
    model: Any = Deployment
    for step in table:
        if _is_table(model):
            model = _table_in(model.model_fields[step].annotation)
        else:
            model = get_args(model)[1]
    return list(model.model_fields) if _is_table(model) else []


def _table_in(annotation: Any) -> Any:
    """The table of a key that may be left out; any other annotation as it is."""
    tables = [each for each in get_args(annotation) if each is not NoneType and _is_table(each)]
    return tables[0] if NoneType in get_args(annotation) and tables else annotation


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
