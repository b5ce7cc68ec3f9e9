"""Verification of one log: every line follows the line before it, and checkpoints are signed.

    files in order ──lines──► Verifier ──► findings, notes, counts

A finding is damage. A note is an event that the log records itself, such as a torn line after a
crash. Records that excuse something count only where their process signed them: `removed` if the
next line is the checkpoint of its rotation, `gap` and the explanation of a torn line once a
checkpoint covers them. After the end of a process only a start follows, and after a start its
checkpoint: lines that were added while no process ran are damage, also once a later start signed
them.

What a log alone cannot show: lines that were not signed when a process died can be edited by
whoever can compute hashes, and the log can be cut back to any checkpoint. The number of lines
(`expected_lines`) or a copy of a head file from elsewhere shows the latter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prfaas.core.audit.chain import GENESIS, Head, Line, parse_line
from prfaas.core.audit.records import TORN, CheckpointCause, RecordKind

FINDINGS_MAX = 100
"""Findings that are kept; all are counted."""

Check = Callable[[bytes, bytes], bool]
"""Returns True if the second argument is a valid signature of the first."""


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A line of a file, from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(slots=True)
class VerificationReport:
    """Result of a verification."""

    findings: list[str] = field(default_factory=list)
    """Damage, in words; the first FINDINGS_MAX."""
    num_findings: int = 0
    notes: list[str] = field(default_factory=list)
    """Events that the log records itself."""
    num_lines: int = 0
    """Number of the last valid line."""
    num_checkpoints: int = 0
    signed_lines: int = 0
    """Number of the line of the last valid checkpoint."""
    signed_at: str = ""
    """Its time, ISO 8601."""
    lost_records: int = 0
    """Records that could not be written, as signed lines state."""

    @property
    def is_intact(self) -> bool:
        """Return True if nothing was found."""
        return not self.num_findings

    @property
    def unsigned_lines(self) -> int:
        """Lines after the last checkpoint."""
        return self.num_lines - self.signed_lines

    def found(self, what: str) -> None:
        """Add damage."""
        self.num_findings += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(what)

    def note(self, what: str) -> None:
        """Add an event."""
        if len(self.notes) < FINDINGS_MAX:
            self.notes.append(what)


class Torn:
    """Broken lines in a row.

    Args:
        place: The first of them.
    """

    def __init__(self, place: LinePlace) -> None:
        self.place = place
        self.num_bytes = 0
        self.is_one_piece = False
        """True if it is one line without its newline."""
        self._hash: hashlib._Hash | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the lines with the newlines between them, hex."""
        return self._hash.hexdigest() if self._hash is not None else ""

    def add(self, data: bytes, *, is_whole: bool) -> None:
        """Add a line without its newline."""
        self.is_one_piece = self._hash is None and not is_whole
        if self._hash is None:
            self._hash = hashlib.sha256(data)
        else:
            self._hash.update(b"\n" + data)
            self.num_bytes += 1
        self.num_bytes += len(data)


class LogVerifier:
    """Takes the lines of a log in order.

    Args:
        log: Name of the process.
        heads: Its head file, a copy of its last checkpoint, and older copies from elsewhere.
    """

    def __init__(self, log: str, check: Check, heads: Sequence[Head]) -> None:
        self.report = VerificationReport()
        self._log, self._check, self._heads = log, check, heads
        self._previous, self._last = GENESIS, ""
        """Digest of the line before, and its kind."""
        self._settled = 0
        """Number of the last line that a checkpoint covers, here or in a removed file."""
        self._awaits_start = False
        """True after the end of a process, and after a start that is not signed yet."""
        self._lost = 0
        """Records that lines state as lost since the last checkpoint."""
        self._explained: list[str] = []
        """Notes on torn lines that a start explained since the last checkpoint."""
        self._file = 0
        self._torn: Torn | None = None
        """Broken lines, until the next line explains them."""
        self._is_lost = False
        """True after damage, until a line is valid by itself."""
        self._first_file = 0
        self._removing = self._removed_through = 0

    def file(self, number: int, name: str) -> None:
        """Begin a file.

        Args:
            number: In its name, from 1.
        """
        self._settle_torn()
        if not self._file:
            self._first_file = number
        elif number != self._file + 1:
            self.report.found(f"{name}: file {self._file + 1} of {self._log} is missing before it")
        self._file = number

    def line(self, data: bytes, place: LinePlace, *, is_whole: bool) -> None:
        """Take the next line.

        Args:
            is_whole: True if it ended with a newline.
        """
        parsed = parse_line(data) if is_whole else None
        if parsed is None:
            self._torn = self._torn or Torn(place)
            self._torn.add(data, is_whole=is_whole)
            return
        self._explain_torn(parsed, place)
        self._connect(parsed, place)
        self._take(parsed, place)

    def finish(self, expected_lines: int = 0) -> VerificationReport:
        """End the log.

        Args:
            expected_lines: Number of lines that is known from elsewhere, such as the metric
                `prfaas_pool_audit_last_line` of its process; 0 if unknown.
        """
        self._settle_torn(is_end=True)
        report, first = self.report, self._first_file
        if first - 1 > self._removed_through:
            report.found(
                f"file {first - 1} of {self._log} is missing, and no signed line records it"
            )
        elif first > 1:
            report.note(f"files 1 to {first - 1} were removed, as the log records")
        for note in self._explained:
            report.found(f"{note}, but that record is not signed")
        for head in self._heads:
            if damage := head.damage(report.signed_lines):
                report.found(damage)
        self._count(expected_lines)
        if not report.num_checkpoints:
            report.found("there is no valid checkpoint: nothing in it is signed")
        return report

    def _count(self, expected_lines: int) -> None:
        report = self.report
        if report.num_lines < expected_lines:
            report.found(
                f"{report.num_lines} lines are here, {expected_lines} were written: "
                f"{expected_lines - report.num_lines} were cut off at the end"
            )
        elif report.signed_lines < expected_lines:
            report.found(
                f"{expected_lines} lines were written, and only {report.signed_lines} are signed: "
                "the others may have been replaced; a running process signs them within "
                "checkpoint_interval, the next start those of one that was killed"
            )

    def _connect(self, line: Line, place: LinePlace) -> None:
        """Compare a line with the one before it."""
        report = self.report
        if line.kind == RecordKind.FILE:
            self._begin(line, place)
        elif not place.line - 1:
            report.found(f"{place}: the first line of a file is missing")
        if line.number != report.num_lines + 1 and not self._is_lost:
            report.found(f"{place}: line {line.number} follows line {report.num_lines}")
        elif not line.follows(self._previous) and not self._is_lost:
            report.found(f"{place}: its hash is wrong: it, or the line before it, was changed")
        if self._awaits_start and not self._may_follow(line.kind):
            report.found(
                f"{place}: it was added after the process had ended: no start is before it"
            )
        self._is_lost = False

    def _may_follow(self, kind: str) -> bool:
        """Return True for a kind of line that can follow an end, or a start without checkpoint."""
        is_signed_start = kind == RecordKind.CHECKPOINT and self._last == RecordKind.START
        return kind in (RecordKind.FILE, RecordKind.START) or is_signed_start

    def _begin(self, line: Line, place: LinePlace) -> None:
        if place.line != 1:
            self.report.found(f"{place}: the first line of a file is in the middle of one")
        if line.fields.get("log") != self._log or line.fields.get("file") != self._file:
            self.report.found(
                f"{place}: it is file {line.fields.get('file')} of {line.fields.get('log')}, "
                f"not file {self._file} of {self._log}"
            )
        if self._file == self._first_file and self._file > 1:
            # What was before it is gone; the checkpoints that follow sign what the header states.
            self._previous = _digest(line.fields.get("previous"))
            self.report.num_lines = self._settled = line.number - 1

    def _take(self, line: Line, place: LinePlace) -> None:
        report, fields = self.report, line.fields
        signed = line.signed(self._previous)
        if line.kind == RecordKind.START:
            self._started(line, place)
        self._previous, report.num_lines = line.digest, line.number
        if line.kind == RecordKind.CHECKPOINT:
            if signed is None or not self._check(*signed):
                report.found(f"{place}: the signature of this checkpoint is wrong")
            else:
                self._signed(line)
        elif line.kind == RecordKind.REMOVED:
            self._removing = _count(fields.get("file"))
        elif line.kind == RecordKind.GAP:
            lost = _count(fields.get("lost"))
            self._lost += lost
            report.note(f"{place}: {lost} records were lost: the log could not be written")
        if line.kind != RecordKind.FILE:
            is_end = line.kind == RecordKind.CHECKPOINT and fields.get("why") == CheckpointCause.END
            self._awaits_start = is_end or line.kind == RecordKind.START
            self._last = line.kind

    def _signed(self, line: Line) -> None:
        """Have the records count that this checkpoint covers."""
        report = self.report
        report.num_checkpoints += 1
        report.signed_lines, report.signed_at = line.number, str(line.fields.get("at"))
        if self._last == RecordKind.REMOVED and line.fields.get("why") == CheckpointCause.ROTATION:
            self._removed_through = max(self._removed_through, self._removing)
        report.lost_records += self._lost
        for note in self._explained:
            report.note(note)
        self._settled, self._lost, self._explained = line.number, 0, []
        for head in self._heads:
            head.take(line)

    def _started(self, line: Line, place: LinePlace) -> None:
        cut, head = line.fields.get("cut_lines", 0), line.fields.get("head")
        if cut:
            self.report.found(f"{place}: at this start {cut} lines were missing before it")
        elif head:
            self.report.found(f"{place}: at this start the last signed line was not in the log")
        elif line.fields.get("after") == "crash":
            num = self.report.num_lines - self._settled
            self.report.note(
                f"{place}: the process before it did not end in order; an edit of its last {num} "
                "lines, which were not signed before this start, does not show"
            )

    def _explain_torn(self, line: Line, place: LinePlace) -> None:
        """A torn line is no damage if the record after it states it."""
        torn, stated = self._torn, line.fields
        is_stated = line.kind == RecordKind.START and stated.get("note") == TORN
        if is_stated and torn is None:
            self.report.found(f"{place}: the torn line that it records is missing before it")
        if is_stated and torn is not None and stated.get("torn_sha256") == torn.digest:
            note = f"{torn.place}: {TORN} ({torn.num_bytes} bytes), recorded after it"
            self._explained.append(note)
            self._torn = None
        self._settle_torn()

    def _settle_torn(self, *, is_end: bool = False) -> None:
        """Broken lines that nothing explained are damage, unless the last one of all is torn."""
        torn, self._torn = self._torn, None
        if torn is None:
            return
        if is_end and torn.is_one_piece:
            self.report.note(f"{torn.place}: it is not complete: written in a crash, or cut")
            return
        self._is_lost = True
        self.report.found(f"{torn.place}: it is no line of an audit log")


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _digest(value: object) -> bytes:
    try:
        return bytes.fromhex(str(value))
    except ValueError:
        return GENESIS
