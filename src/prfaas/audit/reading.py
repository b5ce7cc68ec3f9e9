"""Reading of audit logs, a line at a time: for verification and for queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.audit.chain_file import logs_in
from prfaas.audit.keys import checker
from prfaas.core.audit.chain import LINE_BYTES_MAX, Head, Line, parse_line
from prfaas.core.audit.records import RecordKind
from prfaas.core.audit.verification import LinePlace, LogVerifier, VerificationReport
from prfaas.errors import ConfigError

_BYTES_PER_REPORT = 1 << 18
OnBytes = Callable[[int], None]
"""Called now and then with the bytes that were read since the last call."""


def logs_of(folder: Path, only: str | None = None) -> dict[str, dict[int, Path]]:
    """Files of the logs in a folder; ConfigError if there is none.

    Args:
        folder: As in `[audit]`, or a copy.
        only: Name of one log; None for all.
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
    """Verify a log; ConfigError if a file cannot be read, or there is no public key.

    Args:
        folder: Has its `.head` and, without `public_key`, its `.pub`.
        public_key: 64 hex digits, from another place than the log.
        expected_lines: Number of lines that is known from elsewhere; 0 if unknown.
        known_head: A copy of its head file that was kept elsewhere.
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
    """Valid lines of a log; the chain is not checked; ConfigError if a file cannot be read."""
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


FRAME = frozenset({"n", "hash", "sig"})
"""Fields of every line that say nothing about its record."""
_FILES = frozenset({RecordKind.FILE, RecordKind.CHECKPOINT})
_BYTE_FIELDS = ("bytes", "link_bytes", "wire_bytes")


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that a record has to meet; None and empty ones are met by all."""

    since: str | None = None
    """Earliest time, ISO 8601 in UTC as in the lines."""
    until: str | None = None
    """Time before which a record has to be."""
    kinds: frozenset[str] = frozenset()
    """Kinds; without any, all but lines of the log's own book-keeping."""
    tenant: str | None = None
    """Beginning of a tenant class, or a tenant's name."""
    outcome: str | None = None
    """Of a movement, or the reason of a refusal."""
    source: str | None = None
    """Sending pool of a movement, or pool that a purge is about."""
    operator: str | None = None
    """Name of the operator's key."""
    transfer: str | None = None
    """Beginning of the id of a ticket and its transfer."""

    def takes(self, line: Line) -> bool:
        """Return True if a record meets all conditions."""
        fields, at = line.fields, str(line.fields.get("at"))
        return (
            (self.since is None or at >= self.since)
            and (self.until is None or at < self.until)
            and (line.kind in self.kinds if self.kinds else line.kind not in _FILES)
            and (
                _begins(fields.get("tenant"), self.tenant)
                or self.tenant == fields.get("tenant_name")
            )
            and _begins(fields.get("transfer"), self.transfer)
            and self.outcome in (None, fields.get("outcome"), fields.get("reason"))
            and self.source in (None, fields.get("from"))
            and self.operator in (None, fields.get("operator"))
        )


@dataclass(slots=True)
class Sums:
    """Records and bytes, by what they have in common."""

    rows: dict[tuple[str, str, str, str, str], list[int]] = field(default_factory=dict)
    """By kind, direction, sender, receiver and outcome: records, then `bytes`, `link_bytes` and
    `wire_bytes`."""

    def add(self, line: Line) -> None:
        """Add a record."""
        fields = line.fields
        outcome = fields.get("outcome", fields.get("reason", fields.get("action", "")))
        direction, source, target = (str(fields.get(n, "")) for n in ("direction", "from", "to"))
        key = (line.kind, direction, source, target, str(outcome))
        row = self.rows.setdefault(key, [0] * (1 + len(_BYTE_FIELDS)))
        row[0] += 1
        for place, name in enumerate(_BYTE_FIELDS, 1):
            value = fields.get(name)
            row[place] += value if type(value) is int else 0

    def as_json(self) -> list[dict[str, object]]:
        """The rows, sorted."""
        names = ("kind", "direction", "from", "to", "outcome", "records", *_BYTE_FIELDS)
        return [
            dict(zip(names, (*key, *row), strict=True)) for key, row in sorted(self.rows.items())
        ]


def record_of(log: str, line: Line) -> dict[str, object]:
    """A record without the fields of the chain."""
    shown = {name: value for name, value in line.fields.items() if name not in FRAME}
    return {"log": log, "n": line.number, **shown}


def words(record: dict[str, object]) -> str:
    """A record in one line, for people."""
    rest = [
        f"{name}={value}"
        for name, value in record.items()
        if name not in ("at", "kind", "log", "n") and value not in ("", None)
    ]
    return f"{record['at']} {record['log']} {record['kind']} {' '.join(_safe(rest))}"


def _safe(texts: Iterable[str]) -> Iterable[str]:
    """Texts without control characters: names come from certificates and requests."""
    for text in texts:
        yield text if text.isprintable() else ascii(text)[1:-1]


def _begins(value: object, wanted: str | None) -> bool:
    return wanted is None or (isinstance(value, str) and value.startswith(wanted))
