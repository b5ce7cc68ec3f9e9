"""Lines of a file, plain or gzipped, within limits."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from prfaas.errors import ConfigError
from prfaas.traces.drops import DroppedError
from prfaas.traces.limits import LIMITS, TraceLimits

OnProgress = Callable[[int], None]
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_BYTES_PER_REPORT = 2**18


def refuse(path: Path, line: int, problem: str) -> NoReturn:
    """Report a line that cannot be read.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(f"{path}, line {line}: {problem}")


def read_lines(
    path: Path, on_progress: OnProgress | None = None, limits: TraceLimits = LIMITS
) -> Iterator[tuple[int, bytes | None]]:
    """Number, from 1, and text of every line that is not blank, without white space around it.

    Args:
        path: The file; gzip is recognised by its first bytes. A byte order mark is left out.
        on_progress: Called now and then with the bytes of the file that were read.
        limits: On its size and that of its lines.

    Yields:
        None in place of the text of a line that is too long.

    Raises:
        ConfigError: The file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            num_bytes = 0
            for number, text in _bounded(path, file, limits):
                num_bytes += len(text or b"")
                if on_progress is not None and num_bytes > _BYTES_PER_REPORT:
                    on_progress(raw.tell())
                    num_bytes = 0
                if text is None or text:
                    yield number, text
            if on_progress is not None:
                on_progress(raw.tell())
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"trace {path} cannot be read: {reason}") from None


@contextmanager
def _unpacked(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    gzipped = raw.read(2) == _GZIP_MAGIC or path.suffix == ".gz"
    raw.seek(0)
    if not gzipped:
        yield raw
        return
    with gzip.GzipFile(fileobj=raw, mode="rb") as file:
        yield cast(BinaryIO, file)


def _bounded(path: Path, file: BinaryIO, limits: TraceLimits) -> Iterator[tuple[int, bytes | None]]:
    total = number = 0
    while piece := file.readline(limits.line_bytes_max + 1):
        number, total = number + 1, total + len(piece)
        whole = len(piece) <= limits.line_bytes_max
        first = piece.removeprefix(_BOM) if number == 1 else piece
        while not whole and piece and not piece.endswith(b"\n"):
            piece = file.readline(limits.line_bytes_max)
            total += len(piece)
            _check_total(path, number, total, limits)
        _check_total(path, number, total, limits)
        yield number, first.strip() if whole else None


def _check_total(path: Path, number: int, total: int, limits: TraceLimits) -> None:
    if total > limits.file_bytes_max:
        refuse(path, number, f"the trace exceeds {limits.file_bytes_max:,} bytes; split it")


def text_of(line: bytes | None, limits: TraceLimits = LIMITS) -> bytes:
    """The text of a line that is not too long.

    Raises:
        DroppedError: It is.
    """
    if line is None:
        raise DroppedError("a line is too long", f"is longer than {limits.line_bytes_max:,} bytes")
    return line
