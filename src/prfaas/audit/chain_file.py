"""The files of one audit log: continued after a restart, appended to, rotated.

Synchronous: `writer.py` calls it on a thread of its own. A batch is one `write`; a batch that
cannot be written whole is taken back, so that the file always ends with a whole line while its
process lives. Checkpoints are synchronised to the disk; other lines survive the end of the process,
and the end of the machine if the kernel has written them.

NAME.000001.jsonl   lines; higher numbers continue the chain
NAME.head           copy of the last checkpoint
NAME.pub            public key of the checkpoints
NAME.key            private key, unless `keys` names another directory
NAME.lock           held by the process that writes
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prfaas.audit.keys import public_text, signing_key
from prfaas.audit.settings import AuditSettings
from prfaas.core.audit.chain import GENESIS, Fields, Line, make_line, parse_line
from prfaas.core.audit.records import TORN, CheckpointCause, RecordKind, file_header
from prfaas.errors import ConfigError

_FILE = re.compile(r"(.+)\.([0-9]{6,})\.jsonl")
_ODD = re.compile(r"[^A-Za-z0-9._-]")


def log_name(process: str) -> str:
    """Name of the log of a process: its own, with _ for what no file name should have."""
    return _ODD.sub("_", process)


def file_path(folder: Path, log: str, number: int) -> Path:
    """Path of one file of a log."""
    return folder / f"{log}.{number:06d}.jsonl"


def logs_in(folder: Path) -> dict[str, dict[int, Path]]:
    """Files of each log in a folder, by number."""
    found: dict[str, dict[int, Path]] = {}
    for path in folder.iterdir():
        if named := _FILE.fullmatch(path.name):
            found.setdefault(named[1], {})[int(named[2])] = path
    return {log: dict(sorted(files.items())) for log, files in sorted(found.items())}


def time_text(unix_ns: int) -> str:
    """Unix nanoseconds as text."""
    seconds, rest_ns = divmod(unix_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"


def instant(text: str) -> str:
    """A time as in the lines; ConfigError if it is no time.

    Args:
        text: ISO 8601; without an offset it is UTC.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text[:80]!r} is no time; write 2026-11-23T08:00, in UTC") from None
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return f"{found:%Y-%m-%dT%H:%M:%S}.{found.microsecond:06d}Z"


TAIL_BYTES = 256 << 10
"""Bytes at the end of a file that are searched for its last line."""
FILES_BACK = 2
"""Newest files that are searched for the last signed line: each rotation begins with one."""
MISSING, ELSEWHERE = "missing", "not in the log"
"""States of the copy of the last checkpoint that are damage."""


@dataclass(frozen=True, slots=True)
class End:
    """End of a file."""

    line: Line
    """The last valid line."""
    torn: bytes
    """The bytes after it, without a newline at either end."""
    lacks_newline: bool
    """True if the file does not end with a newline."""


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


Record = tuple[int, Fields]
"""Unix time in nanoseconds, and the fields."""


class ChainFile:
    """Appends to a log.

    Raises:
        ConfigError: The folder, the key or the end of the log cannot be used.
    """

    def __init__(
        self, settings: AuditSettings, process: str, unix_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._settings, self._unix_ns = settings, unix_ns
        self._log, self._folder = log_name(process), settings.folder
        self.num_lines = self._num_writes = 0
        self.signed_lines = 0
        """Number of the line of the last checkpoint."""
        self._previous, self._descriptor, self._number, self._size = GENESIS, -1, 0, 0
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._key = signing_key(settings.keys / f"{self._log}.key")
            self._lock = self._locked()
            self.public_key = public_text(self._key)
            self._show_key()
            self._continue()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"audit log of {process} in {self._folder}: {reason}") from None

    def append(self, records: Sequence[Record]) -> None:
        """Write records with one call.

        Raises:
            OSError: They could not be written; nothing of them is in the file.
        """
        lines, number, previous = [], self.num_lines, self._previous
        for at_ns, fields in records:
            number += 1
            line, previous = make_line(number, time_text(at_ns), fields, previous)
            lines.append(line)
        self._write(b"".join(lines), number, previous)

    def checkpoint(self, why: CheckpointCause) -> None:
        """Sign all lines so far, and have the disk keep them.

        Raises:
            OSError: It could not be written.
        """
        number = self.num_lines + 1
        fields = {"kind": RecordKind.CHECKPOINT, "why": why, "lines": number}
        at = time_text(self._unix_ns())
        line, digest = make_line(number, at, fields, self._previous, self._key.sign)
        self._write(line, number, digest)
        os.fdatasync(self._descriptor)
        self._replace(f"{self._log}.head", line)
        self.signed_lines = number

    def take_writes(self) -> int:
        """Write calls since the last call of this function."""
        count, self._num_writes = self._num_writes, 0
        return count

    @property
    def is_large(self) -> bool:
        """Return True if a new file is due."""
        return self._size >= self._settings.rotate_bytes

    def rotate(self) -> None:
        """Sign this file and begin the next one.

        Raises:
            OSError: There is no room for it; this one is continued.
        """
        self.checkpoint(CheckpointCause.ROTATION)
        self._begin(self._number + 1)
        self._remove_old()

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._descriptor, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._lock = -1

    # --- start ---

    def _locked(self) -> int:
        descriptor = os.open(self._folder / f"{self._log}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ConfigError(
                f"another process writes the audit log {self._log} in {self._folder}; two "
                "processes need two names or two folders"
            ) from None
        return descriptor

    def _show_key(self) -> None:
        """Write the public key for verification; ConfigError if the log was signed with another
        key."""
        path = self._folder / f"{self._log}.pub"
        if path.exists() and path.read_text().strip() != self.public_key:
            raise ConfigError(
                f"{path} is not the public part of {self._settings.keys / self._log}.key: one log "
                "has one key; restore the key, or move the log and its .pub and .head away"
            )
        if not path.exists():
            self._replace(path.name, f"{self.public_key}\n".encode())

    def _continue(self) -> None:
        """Open the newest file after its last valid line, or the first one."""
        files = logs_in(self._folder).get(self._log, {})
        newest = max(files, default=1)
        end = None
        for number in sorted(files, reverse=True):
            end = end_of(files[number])
            if end is not None:
                break
        if end is None:
            if any(path.stat().st_size for path in files.values()):
                raise ConfigError(
                    f"no line of {file_path(self._folder, self._log, newest)} can be read: the "
                    "log cannot be continued; move its files away to begin a new one"
                )
            self._begin(newest, is_anew=True)
            self._record_start("nothing", b"")
            return
        self.num_lines, self._previous = end.line.number, end.line.digest
        after = "end" if end.line.fields.get("why") == CheckpointCause.END else "crash"
        if number != newest:
            # Only the first line of the newest file was torn.
            self._begin(newest, is_anew=True)
            self._record_start("crash", b"")
            return
        self._open(newest)
        if end.lacks_newline:
            self._write(b"\n", self.num_lines, self._previous)
        self._record_start("crash" if end.torn else after, end.torn)

    def _record_start(self, after: str, torn: bytes) -> None:
        fields: dict[str, object] = {
            "kind": RecordKind.START,
            "after": after,
            "key": self.public_key,
        }
        if torn:
            digest = hashlib.sha256(torn).hexdigest()
            fields |= {"note": TORN, "torn_bytes": len(torn), "torn_sha256": digest}
        head = self._folder / f"{self._log}.head"
        data = head.read_bytes().removesuffix(b"\n") if head.exists() else None
        self.head = head_state(logs_in(self._folder).get(self._log, {}), data)
        """State of the last signed line at the start, if it was not in the log; else empty."""
        signed = parse_line(data) if data is not None else None
        self.cut_lines = max(0, signed.number - self.num_lines) if signed is not None else 0
        """Signed lines that were missing at the start."""
        if self.cut_lines:
            fields["cut_lines"] = self.cut_lines
        if self.head:
            fields["head"] = self.head
        self.append([(self._unix_ns(), fields)])
        self.checkpoint(CheckpointCause.START)

    # --- files ---

    def _open(self, number: int) -> None:
        path = file_path(self._folder, self._log, number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._number = descriptor, number
        self._size = os.fstat(descriptor).st_size

    def _begin(self, number: int, *, is_anew: bool = False) -> None:
        """Write the first line of a file; a file without one stays unused if that fails."""
        old = self._descriptor, self._number, self._size
        self._descriptor = -1
        try:
            self._open(number)
            if is_anew:
                os.ftruncate(self._descriptor, 0)
                self._size = 0
            self.append([(self._unix_ns(), file_header(self._log, number, self._previous))])
        except OSError:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                file_path(self._folder, self._log, number).unlink()
            self._descriptor, self._number, self._size = old
            raise
        if old[0] >= 0:
            os.close(old[0])
        self._sync_folder()

    def _remove_old(self) -> None:
        """Delete files beyond `keep`, after the log has recorded it."""
        files = logs_in(self._folder)[self._log]
        surplus = list(files)[: -self._settings.keep] if self._settings.keep else []
        if surplus:
            record = {"kind": RecordKind.REMOVED, "file": surplus[-1], "files": len(surplus)}
            self.append([(self._unix_ns(), record)])
            self.checkpoint(CheckpointCause.ROTATION)
        for number in surplus:
            files[number].unlink()

    def _write(self, data: bytes, number: int, previous: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
                self._num_writes += 1
        except OSError:
            if written:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self.num_lines, self._previous = number, previous

    def _replace(self, name: str, data: bytes) -> None:
        """Replace a small file: it has the old content or the new one, whole."""
        draft, path = self._folder / f"{name}.new", self._folder / name
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
