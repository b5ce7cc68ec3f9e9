"""Lines of a trace file, plain or gzipped, within limits. Errors name file, line and value."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar, cast

import msgspec

from prfaas.errors import ConfigError

Row = TypeVar("Row")

FILE_BYTES_MAX = 2**30
LINE_BYTES_MAX = 2**24
NUM_PROMPT_TOKENS_MAX = 2_000_000
NUM_OUTPUT_TOKENS_MAX = 2_000_000
BLOCK_ID_MAX = 2**48
SECONDS_MAX = 10.0**9


def refuse(path: Path, line: int, problem: str) -> NoReturn:
    """Say what is wrong with a line.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(f"{path}, line {line}: {problem}")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of every line that is not blank.

    Raises:
        ConfigError: The file can not be read, or a limit is exceeded.
    """
    try:
        with _opened(path) as file:
            yield from _bounded(path, file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} can not be read: {reason}") from None


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _bounded(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    total = number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number, total = number + 1, total + len(line)
        if len(line) > LINE_BYTES_MAX:
            refuse(path, number, f"is longer than {LINE_BYTES_MAX:,} bytes")
        if total > FILE_BYTES_MAX:
            refuse(path, number, f"the trace exceeds {FILE_BYTES_MAX:,} bytes; split it")
        if not line.isspace():
            yield number, line


def decode(decoder: msgspec.json.Decoder[Row], path: Path, number: int, line: bytes) -> Row:
    """One line of JSON.

    Raises:
        ConfigError: It is no JSON, or a field is missing or has the wrong type.
    """
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return refuse(path, number, str(error))


def in_range(
    path: Path, line: int, field: str, value: float, low: float, high: float, unit: str = ""
) -> None:
    """Refuse a value outside its range.

    Raises:
        ConfigError: It is.
    """
    if not low <= value <= high:
        expected = f"{_shown(low)} to {_shown(high)} {unit}".strip()
        refuse(path, line, f"{field} is {_shown(value)}; expected {expected}")


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.15g}"
