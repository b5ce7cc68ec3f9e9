"""The end of an audit log, as a process finds it when it begins to write."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.audit.chain import Line, parse_line
from prfaas.core.audit.records import CheckpointCause, RecordKind

TAIL_BYTES = 256 << 10
"""Bytes at the end of a file that are searched for its last line."""
FILES_BACK = 2
"""Newest files that are searched for the last signed line: each rotation begins with one."""
MISSING, ELSEWHERE = "missing", "not in the log"
"""States of the copy of the last checkpoint that are damage."""


@dataclass(frozen=True, slots=True)
class End:
    """End of a file.

    Attributes:
        line: The last valid line.
        torn: The bytes after it, without a newline at either end.
        lacks_newline: True if the file does not end with a newline.
    """

    line: Line
    torn: bytes
    lacks_newline: bool


def end_of(path: Path) -> End | None:
    """The end of a file; None if no valid line is near it."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        *pieces, rest = file.read().split(b"\n")
    pieces += [rest] if rest else []
    for number in range(len(pieces) - 1, -1, -1):
        line = parse_line(pieces[number])
        if line is not None:
            return End(line, b"\n".join(pieces[number + 1 :]), bool(rest))
    return None


def head_state(files: dict[int, Path], head: bytes | None) -> str:
    """Compare a log with the copy of its last checkpoint, before anything new is signed.

    A checkpoint that a start adds covers all lines before it, so that later nothing would show that
    signed ones were replaced.

    Args:
        files: Of the log, by number.
        head: Content of its head file; None if there is none.

    Returns:
        MISSING or ELSEWHERE; empty if the checkpoint is in the log, or if the process was killed
        before it had copied its first one.
    """
    lines = (line for number in sorted(files)[-FILES_BACK:][::-1] for line in _back(files[number]))
    if head is None:
        signed = next((line for line in lines if line.kind == RecordKind.CHECKPOINT), None)
        return (
            "" if signed is None or signed.fields.get("why") == CheckpointCause.START else MISSING
        )
    wanted = parse_line(head)
    if wanted is not None:
        for line in lines:
            if line.number <= wanted.number:
                return "" if line.body == wanted.body else ELSEWHERE
    return ELSEWHERE


def _back(path: Path) -> Iterator[Line]:
    """Valid lines of a file, the last one first."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if not end:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while end > 0:
                start = data.rfind(b"\n", 0, end) + 1
                line = parse_line(data[start:end])
                if line is not None:
                    yield line
                end = start - 1
