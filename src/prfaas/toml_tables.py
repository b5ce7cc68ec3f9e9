"""TOML files as typed tables; errors name the key, its place and the nearest valid one."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from prfaas.errors import ConfigError
from prfaas.limited_files import DEPTH_MAX, FILE_BYTES_MAX, check_values, read_limited

Table = TypeVar("Table", bound=BaseModel)
_NUMBER_MAX = 2**63
_NO_WORDS: Mapping[str, str] = MappingProxyType({})


_NO_KEY = frozenset(",=[]{}#")
"""Characters that end a key."""


def read_toml(path: Path, bytes_max: int = FILE_BYTES_MAX) -> dict[str, Any]:
    """Tables of a TOML file; a byte order mark, as some editors write it, is left out.

    Raises:
        ConfigError: The file cannot be read, is no TOML, or is beyond a limit.
    """
    try:
        text = read_limited(path, bytes_max).decode("utf-8-sig")
        if text.lstrip().startswith("{"):
            raise ConfigError(f"{path} is no valid TOML: it begins with {{, as JSON does")
        if (line := _long_key(text)) is not None:
            raise ConfigError(f"{path}: line {line}: a key of more than {DEPTH_MAX} parts")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: values lie deeper than {DEPTH_MAX} levels") from None
    except ValueError as error:  # Of numbers and characters as well.
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    check_values(tables, path)
    return tables


_KINDS = (
    ("a deployment file", "clusters", "prfaas up", "two-sites"),
    ("a scenario file", "plan", "prfaas simulate", "simulate"),
    ("a plan file", "pd", "prfaas plan", "plan"),
)
"""Kinds of files: a key that only one of them has, its command, and what `prfaas init` calls it."""


def refuse_other_kind(tables: Mapping[str, Any], path: Path, wanted: str) -> None:
    """Refuse a file of another kind; ConfigError if a deployment, scenario or plan file is in the
    place of another one.

    Args:
        wanted: Command of the kind that is read, such as "prfaas up".
    """
    [(mine, key, _, example)] = [kind for kind in _KINDS if kind[2] == wanted]
    if key in tables:
        return
    for what, other_key, command, _ in _KINDS:
        if other_key in tables:
            raise ConfigError(
                f"{path} is {what}, for `{command}`; `{wanted}` takes {mine}, such as "
                f"`prfaas init {example}` writes"
            )


def _long_key(text: str) -> int | None:
    """Number of a line with a key of too many parts, which take the parser a time that grows with
    their square; None without one."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") <= DEPTH_MAX:
            continue
        length = 0
        for part in line.split("."):
            length = 0 if _NO_KEY.intersection(part) else length + 1
            if length > DEPTH_MAX:
                return number
    return None


def refuse_unused(table: BaseModel, key: str, uses: Mapping[str, Collection[str]]) -> None:
    """Refuse keys of a table that have no effect with its value of another key; ValueError if a key
    was given that is not for this value.

    Args:
        uses: Values of the other key that a key is for; a key that is left out is for all.
    """
    value = getattr(table, key)
    for name in sorted(table.model_fields_set & uses.keys()):
        if value not in uses[name]:
            values = " or ".join(f'"{each}"' for each in uses[name])
            raise ValueError(
                f'{name} is for {key} = {values}, not for {key} = "{value}"; leave it out'
            )


def validated(
    model: type[Table],
    tables: dict[str, Any],
    path: Path,
    *,
    words: Mapping[str, str] = _NO_WORDS,
    secrets: Collection[str] = (),
) -> Table:
    """The file as a typed table.

    Args:
        path: Where it lies, for messages.
        words: By pattern, what a text has to be that does not match it.
        secrets: Keys whose values are not repeated in a message, whatever they are.

    Raises:
        ConfigError: A rule is broken; one line for every problem.
    """
    if extreme := list(_extreme(tables)):
        raise ConfigError("\n  ".join([f"{path}:", *extreme]))
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        problems = (_problem(model, entry, words, secrets) for entry in error.errors())
        raise ConfigError("\n  ".join([f"{path}:", *problems])) from None


def _extreme(value: object, place: str = "") -> Iterator[str]:
    """A line for every number that is none, infinite, or beyond the range of TOML's integers."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _extreme(each, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _extreme(each, f"{place}.{number}")
    elif isinstance(value, int | float) and not abs(value) < _NUMBER_MAX:
        yield f"{place}: {value:g} is no number below {_NUMBER_MAX:g}; correct it"


def quantity(value: object, parse: Callable[[str], int], example: str) -> int:
    """A number with a unit, for validators; ValueError if it has no unit, or one that is not known.

    Args:
        value: As it stands in the file.
        parse: One of `prfaas.units`.
        example: How it may be written.
    """
    if not isinstance(value, str):
        raise ValueError(f'{value!r} has no unit; write it as text, as in "{example}"')
    try:
        return parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def known_keys(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Keys that the table at this place of a file may have; none where there is no table."""
    found: Any = model
    for step in place:
        # Of lists and mappings, the type of what is in them comes last.
        inner = found.model_fields[step].annotation if _is_table(found) else get_args(found)[-1]
        found = _value_type(inner)
    return list(found.model_fields) if _is_table(found) else []


def _problem(
    model: type[BaseModel], entry: Any, words: Mapping[str, str], secrets: Collection[str]
) -> str:
    place = ".".join(str(step) for step in entry["loc"] if step != "[key]")
    if entry["type"] == "extra_forbidden":
        *table, key = entry["loc"]
        near = difflib.get_close_matches(str(key), known_keys(model, table), n=1, cutoff=0.0)
        return f"{place}: unknown key; the nearest valid one is {near[0]!r}"
    if entry["type"] == "missing":
        return f"{place}: is required"
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "string_pattern_mismatch":
        pattern = entry["ctx"]["pattern"]
        message = f"has to be {words[pattern]}" if pattern in words else message
    # Rules of our own say the value themselves.
    is_told = entry["type"] == "value_error" or isinstance(entry["input"], dict | list)
    is_told = is_told or any(step in secrets for step in entry["loc"])
    return f"{place or 'file'}: {message}" + ("" if is_told else f", got {entry['input']!r}")


def _value_type(annotation: Any) -> Any:
    """A type without limits, and without None: of several, one with tables in it."""
    while get_origin(annotation) in (Annotated, UnionType, Union):
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
            continue
        options = [option for option in get_args(annotation) if option is not NoneType]
        annotation = next(filter(_has_tables, options), options[0])
    return annotation


def _has_tables(annotation: Any) -> bool:
    return _is_table(annotation) or any(map(_is_table, get_args(annotation)))


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
