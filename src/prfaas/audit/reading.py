"""Reading of audit logs: for verification and for queries, a line at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from prfaas.audit.chain_file import logs_in
from prfaas.audit.keys import checker
from prfaas.core.audit.chain import LINE_BYTES_MAX, Line, parse_line
from prfaas.core.audit.heads import Head
from prfaas.core.audit.verification import LinePlace, LogVerifier, VerificationReport
from prfaas.errors import ConfigError

_BYTES_PER_REPORT = 1 << 18
OnBytes = Callable[[int], None]
"""Called now and then with the bytes that were read since the last call."""


def logs_of(folder: Path, only: str | None = None) -> dict[str, dict[int, Path]]:
    """Files of the logs in a folder.

    Args:
        folder: As in `[audit]`, or a copy.
        only: Name of one log; None for all.

    Raises:
        ConfigError: There is none.
    """
    try:
        found = logs_in(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    if only is not None:
        found = {log: files for log, files in found.items() if log == only}
    if not found:
        wanted = f"of {only} " if only else ""
        raise ConfigError(f"there is no audit log {wanted}in {folder} (NAME.000001.jsonl)")
    return found


def num_bytes(files: dict[int, Path]) -> int:
    """Size of the files of a log."""
    return sum(path.stat().st_size for path in files.values())


def verify(
    folder: Path,
    log: str,
    files: dict[int, Path],
    *,
    public_key: str | None = None,
    expected_lines: int = 0,
    known_head: Path | None = None,
    on_bytes: OnBytes = lambda _: None,
) -> VerificationReport:
    """Verify a log.

    Args:
        folder: Has its `.head` and, without `public_key`, its `.pub`.
        public_key: 64 hex digits, from another place than the log.
        expected_lines: Number of lines that is known from elsewhere; 0 if unknown.
        known_head: A copy of its head file that was kept elsewhere.

    Raises:
        ConfigError: A file cannot be read, or there is no public key.
    """
    try:
        check = checker(public_key or (folder / f"{log}.pub").read_text())
        head = folder / f"{log}.head"
        heads = [Head(head.name, head.read_bytes() if head.exists() else None)]
        heads += [Head(str(known_head), known_head.read_bytes())] if known_head else []
        verifier = LogVerifier(log, check, heads)
        for number, path in files.items():
            verifier.file(number, path.name)
            for place, data, is_whole in _lines(path, on_bytes):
                verifier.line(data, place, is_whole=is_whole)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the audit log {log} in {folder} cannot be read: {error}") from None
    return verifier.finish(expected_lines)


def records(files: dict[int, Path], on_bytes: OnBytes = lambda _: None) -> Iterator[Line]:
    """Valid lines of a log; the chain is not checked.

    Raises:
        ConfigError: A file cannot be read.
    """
    for path in files.values():
        try:
            for _, data, _ in _lines(path, on_bytes):
                line = parse_line(data)
                if line is not None:
                    yield line
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _lines(path: Path, on_bytes: OnBytes) -> Iterator[tuple[LinePlace, bytes, bool]]:
    """Place, content and wholeness of each line; a longer one than allowed comes in pieces."""
    number = unreported = 0
    with path.open("rb") as file:
        while data := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            is_whole = data.endswith(b"\n")
            unreported += len(data)
            if unreported >= _BYTES_PER_REPORT:
                on_bytes(unreported)
                unreported = 0
            yield LinePlace(path.name, number), data.removesuffix(b"\n"), is_whole
    on_bytes(unreported)
