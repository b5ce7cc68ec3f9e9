"""Lines of a file, plain or compressed, within limits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from prfaas.errors import ConfigError
from prfaas.traces.checks import LIMITS, DroppedError, TraceLimits

OnProgress = Callable[[int], None]
_UNPACKERS: dict[bytes, Callable[[BinaryIO], object]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_UTF16 = "text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8 FILE"
_TABLE = "a table in a binary format; write it as CSV with a header, or as JSON lines"
_OTHERS = {
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it, or export it as CSV",
    b"(\xb5/\xfd": "packed with zstd; unpack it: zstd -d FILE",
    b"\x04\x22M\x18": "packed with lz4; unpack it: lz4 -d FILE",
    b"7z\xbc\xaf'\x1c": "a 7-Zip archive; unpack it",
    b"\x1f\x8b": "packed with gzip twice; unpack it once: gunzip FILE",
    b"BZh": "packed twice, the second time with bzip2; unpack it once",
    b"\xfd7zXZ\x00": "packed twice, the second time with xz; unpack it once",
    b"PAR1": f"Parquet, {_TABLE}",
    b"ARROW1": f"Arrow, {_TABLE}",
    b"ORC": f"ORC, {_TABLE}",
    b"Obj\x01": f"Avro, {_TABLE}",
    b"SQLite format 3\x00": f"an SQLite database, {_TABLE}",
    b"\x89HDF": f"HDF5, {_TABLE}",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_HEAD_BYTES = 512
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
    """Number, from 1, and text of every line that is not blank, without white space around it;
    ConfigError if the file cannot be read, or is too large.

    Args:
        path: The file; gzip, bzip2 and xz are recognised by its first bytes. A byte order mark is
            left out.
        on_progress: Called now and then with the bytes of the file that were read.
        limits: On its size and that of its lines.

    Yields:
        None in place of the text of a line that is too long.
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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"trace {path} cannot be read: {reason}") from None


@contextmanager
def _unpacked(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    head = raw.read(_HEAD_BYTES)
    raw.seek(0)
    unpack = next((each for magic, each in _UNPACKERS.items() if head.startswith(magic)), None)
    if unpack is None and path.suffix == ".gz" and head:
        raise ConfigError(f"trace {path} cannot be read: its name ends in .gz and it is no gzip")
    if unpack is None:
        _refuse_binary(path, head)
        yield raw
        return
    with cast(BinaryIO, unpack(raw)) as file:
        _refuse_binary(path, file.read(_HEAD_BYTES))
        file.seek(0)
        yield file


def _refuse_binary(path: Path, head: bytes) -> None:
    """Refuse a file that is no text, from its first bytes.

    Raises:
        ConfigError: It is in a known binary format, or is full of NUL bytes.
    """
    found = next((words for magic, words in _OTHERS.items() if head.startswith(magic)), None)
    if found is None and head[257:262] == b"ustar":
        found = "a tar archive; unpack it: tar -xf FILE"
    if found is None and head.count(b"\0") > len(head) // 20:
        is_text = any(b"\0" not in head[i::2] for i in (0, 1))
        found = _UTF16 if is_text else "no text; expected CSV with a header, or JSON lines"
    if found is not None:
        raise ConfigError(f"trace {path} is {found}")


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
    """The text of a line that is not too long; DroppedError if it is."""
    if line is None:
        raise DroppedError("a line is too long", f"is longer than {limits.line_bytes_max:,} bytes")
    return line
