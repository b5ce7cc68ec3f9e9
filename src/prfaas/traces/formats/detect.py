"""The format of a file, from its first lines."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from prfaas.errors import ConfigError
from prfaas.traces.checks import shown_name
from prfaas.traces.formats import mooncake
from prfaas.traces.formats.columns import CSV_FORMATS, columns_of
from prfaas.traces.lines import read_lines

SESSIONS = "sessions"
CHATS = "chats"
REQUEST_FORMATS = (mooncake.NAME, *(form.name for form in CSV_FORMATS))
"""Formats of requests that come at instants of their own."""
_NUM_LINES = 20
_MARKS = (
    (mooncake.NAME, {"input_length"}),
    (SESSIONS, {"block_size", "requests"}),
    (CHATS, {"messages"}),
    (CHATS, {"conversations"}),
    (CHATS, {"conversation"}),
    (CHATS, {"message"}),
    (CHATS, {"role", "content"}),
)
"""Formats of JSON lines by fields that only they have."""


def detect(path: Path) -> str:
    """The name of a file's format.

    Raises:
        ConfigError: The file cannot be read, is empty, or is in no known format.
    """
    found: list[str] = []
    for number, line in islice(read_lines(path), _NUM_LINES):
        if line is None or line.startswith(b"{"):
            fields = _fields(line or b"")
            for name, marks in _MARKS:
                if marks <= fields:
                    return name
            found.append(f"line {number} with the fields {_shown(sorted(fields))}")
        elif line.startswith(b"[") and not found:
            raise ConfigError(
                f"trace {path}: a JSON array; expected one object a line: jq -c '.[]' FILE"
            )
        else:
            columns = columns_of(line)
            if not found and (table := _table(path, columns)):
                return table
            # It may be a damaged line before lines of JSON.
            found.append(f"line {number} with the columns {_shown(columns)}")
    if not found:
        raise ConfigError(f"trace {path} holds no requests: the file is empty")
    raise _unknown(path, found[0])


def _shown(names: list[str]) -> str:
    return ", ".join(map(shown_name, names[:8])) or "(none)"


def _fields(line: bytes) -> set[str]:
    try:
        return set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()


def _table(path: Path, columns: list[str]) -> str | None:
    for form in CSV_FORMATS:
        if form.matches(columns):
            return form.name
    if "rate_rps" in columns:
        raise ConfigError(
            f"trace {path} holds rates over time and no requests; a simulation follows them with "
            'arrivals = "diurnal", curve and curve_model'
        )
    return None


def _unknown(path: Path, found: str) -> ConfigError:
    known = "; ".join(
        f"{form.name}: {', '.join(n for n in (form.instant, form.prompt[0]) if n)}"
        for form in CSV_FORMATS
    )
    return ConfigError(
        f"trace {path}: {found[:400]}; expected JSON lines with input_length (mooncake), "
        "block_size and requests (sessions) or messages (chats), or a table with a header "
        f"({known})"
    )
