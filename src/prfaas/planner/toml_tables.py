"""TOML tables as typed values; errors name the key, its place and the nearest valid one."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from prfaas.errors import ConfigError

Table = TypeVar("Table", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """Tables of a TOML file.

    Raises:
        ConfigError: The file can not be read or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None


def validated(model: type[Table], tables: dict[str, Any], path: Path) -> Table:
    """The file as a typed table.

    Raises:
        ConfigError: A rule is broken; one line for every problem.
    """
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        problems = "\n  ".join(_problem(model, entry) for entry in error.errors())
        raise ConfigError(f"{path}:\n  {problems}") from None


def _problem(model: type[BaseModel], entry: Any) -> str:
    place = ".".join(str(step) for step in entry["loc"])
    if entry["type"] == "extra_forbidden":
        *table, key = entry["loc"]
        near = difflib.get_close_matches(str(key), _keys(model, table), n=1, cutoff=0.0)
        return f"{place}: unknown key; the nearest valid one is {near[0]!r}"
    if entry["type"] == "missing":
        return f"{place}: is required"
    message = entry["msg"].removeprefix("Value error, ")
    is_own = entry["type"] == "value_error"
    shown = f", got {entry['input']!r}" if not is_own and not _nested(entry["input"]) else ""
    return f"{place or 'file'}: {message}{shown}"


def _nested(value: object) -> bool:
    return isinstance(value, dict | list)


def _keys(model: type[BaseModel], table: Sequence[str | int]) -> list[str]:
    """Valid keys of the table at this place."""
    found: Any = model
    for step in table:
        if isinstance(step, int):
            continue
        found = _table_in(found.model_fields[step].annotation)
    return list(found.model_fields)


def _table_in(annotation: Any) -> Any:
    options = get_args(annotation) if isinstance(annotation, UnionType) else [annotation]
    inner = [arg for option in options for arg in (get_args(option) or [option])]
    return next(a for a in inner if isinstance(a, type) and issubclass(a, BaseModel))


def override(tables: dict[str, Any], setting: str) -> None:
    """Apply one "a.b=value" to tables in place; the value is TOML, or text as it stands.

    Raises:
        ConfigError: The setting has no value, or its key leads nowhere.
    """
    name, separator, text = setting.partition("=")
    steps = name.strip().split(".")
    if not separator or not all(steps):
        raise ConfigError(f'--set {setting!r}: expected key=value, as in "pd.instances=10"')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target: Any = tables
    for step in steps[:-1]:
        target = _step_into(target, step, setting)
    if isinstance(target, list):
        raise ConfigError(f"--set {setting!r}: name an item by its index, as in {steps[0]}.0.name")
    target[steps[-1]] = value


def _step_into(target: Any, step: str, setting: str) -> Any:
    if isinstance(target, list):
        if not step.isdigit() or int(step) >= len(target):
            raise ConfigError(
                f"--set {setting!r}: {step!r} is not an index below {len(target)}; items are "
                "counted from 0"
            )
        return target[int(step)]
    inner = target.setdefault(step, {})
    if not isinstance(inner, dict | list):
        raise ConfigError(f"--set {setting!r}: {step!r} is a value, not a table")
    return inner
