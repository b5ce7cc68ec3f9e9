"""Reading a deployment file, with errors an operator can act on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prfaas.config.deployment import Deployment
from prfaas.config.names import PATTERNS
from prfaas.errors import ConfigError
from prfaas.toml_tables import read_toml, refuse_other_kind, validated


def load_deployment(path: Path, overlay: Path | None = None) -> Deployment:
    """Read and check a deployment file. Relative paths in it start at the working directory.

    Args:
        overlay: A file of the same form whose keys take precedence, such as the settings that
            `prfaas plan --emit` writes.

    Raises:
        ConfigError: A file cannot be read, is no TOML, or breaks a rule; the message has one
            line for every problem.
    """
    tables = read_toml(path)
    refuse_other_kind(tables, path, "prfaas up")
    if overlay is not None:
        tables = _merged(tables, read_toml(overlay))
    if nuls := list(_nuls(tables)):
        raise ConfigError("\n  ".join([f"{path}:", *nuls]))
    # The value may be a key in place of its hash.
    return validated(Deployment, tables, path, words=PATTERNS, secrets=("keys", "operator_keys"))


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
