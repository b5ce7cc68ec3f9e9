"""Verification of one log: every line follows the line before it, and checkpoints are signed.

    files in order ──lines──► Verifier ──► findings, notes, counts

A finding is damage. A note is an event that the log records itself, such as a torn line after a
crash. What a log alone cannot show: lines after its last checkpoint can be edited by whoever can
compute hashes, and cut off, unless the count is known from elsewhere (`expected_lines`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.core.audit.chain import GENESIS, Line, parse_line
from prfaas.core.audit.records import TORN, Kind

FINDINGS_MAX = 100
"""Findings that are kept; all are counted."""

Check = Callable[[bytes, bytes], bool]
"""Returns True if the second argument is a valid signature of the first."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(slots=True)
class Report:
    """Result of a verification.

    Attributes:
        findings: Damage, in words; the first FINDINGS_MAX.
        num_findings: All damage.
        notes: Events that the log records itself.
        num_lines: Number of the last valid line.
        num_checkpoints: Valid checkpoints.
        signed_lines: Number of the line of the last valid checkpoint.
        signed_at: Its time, ISO 8601.
        lost_records: Records that could not be written, as the log states.
    """

    findings: list[str] = field(default_factory=list)
    num_findings: int = 0
    notes: list[str] = field(default_factory=list)
    num_lines: int = 0
    num_checkpoints: int = 0
    signed_lines: int = 0
    signed_at: str = ""
    lost_records: int = 0

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

    def __init__(self, place: Place) -> None:
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


class Verifier:
    """Takes the lines of a log in order.

    Args:
        log: Name of the process.
        check: Verifies signatures.
        head: Content of its head file, a copy of its last checkpoint; None without one.
    """

    def __init__(self, log: str, check: Check, head: bytes | None) -> None:
        self.report = Report()
        self._log, self._check = log, check
        self._has_head = head is not None
        self._head = parse_line(head.removesuffix(b"\n")) if head is not None else None
        self._previous = GENESIS
        self._file = 0
        self._torn: Torn | None = None
        """Broken lines, until the next line explains them."""
        self._is_lost = False
        """True after damage, until a line is valid by itself."""
        self._first_file = 0
        self._removed_through = 0
        self._is_head_here = False

    def file(self, number: int, name: str) -> None:
        """Begin a file.

        Args:
            number: In its name, from 1.
            name: For findings.
        """
        self._settle_torn()
        if not self._file:
            self._first_file = number
        elif number != self._file + 1:
            self.report.found(f"{name}: file {self._file + 1} of {self._log} is missing before it")
        self._file = number

    def line(self, data: bytes, place: Place, *, is_whole: bool) -> None:
        """Take the next line.

        Args:
            data: Without its newline.
            place: For findings.
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

    def finish(self, expected_lines: int = 0) -> Report:
        """End the log.

        Args:
            expected_lines: Number of lines that is known from elsewhere, such as the metric
                `prfaas_pool_audit_last_line` of its process; 0 if unknown.
        """
        self._settle_torn(is_end=True)
        report, first = self.report, self._first_file
        if first - 1 > self._removed_through:
            report.found(f"file {first - 1} of {self._log} is missing, and no line records it")
        elif first > 1:
            report.note(f"files 1 to {first - 1} were removed, as the log records")
        self._compare()
        if report.num_lines < expected_lines:
            report.found(
                f"{report.num_lines} lines are here, {expected_lines} were written: "
                f"{expected_lines - report.num_lines} were cut off at the end"
            )
        if not report.num_checkpoints:
            report.found("there is no valid checkpoint: nothing in it is signed")
        return report

    def _connect(self, line: Line, place: Place) -> None:
        """Compare a line with the one before it."""
        report = self.report
        if line.kind == Kind.FILE:
            self._begin(line, place)
        elif not place.line - 1:
            report.found(f"{place}: the first line of a file is missing")
        if line.number != report.num_lines + 1 and not self._is_lost:
            report.found(f"{place}: line {line.number} follows line {report.num_lines}")
        elif not line.follows(self._previous) and not self._is_lost:
            report.found(f"{place}: its hash is wrong: it, or the line before it, was changed")
        self._is_lost = False

    def _begin(self, line: Line, place: Place) -> None:
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
            self.report.num_lines = line.number - 1

    def _take(self, line: Line, place: Place) -> None:
        report = self.report
        signed = line.signed(self._previous)
        self._previous, report.num_lines = line.digest, line.number
        if line.kind == Kind.CHECKPOINT:
            if signed is None or not self._check(*signed):
                report.found(f"{place}: the signature of this checkpoint is wrong")
                return
            report.num_checkpoints += 1
            report.signed_lines, report.signed_at = line.number, str(line.fields.get("at"))
            if self._head is not None and self._head.number == line.number:
                self._is_head_here = self._head.body == line.body
        elif line.kind == Kind.REMOVED:
            self._removed_through = max(self._removed_through, _count(line.fields.get("file")))
        elif line.kind == Kind.GAP:
            lost = _count(line.fields.get("lost"))
            report.lost_records += lost
            report.note(f"{place}: {lost} records were lost: the log could not be written")
        elif line.kind == Kind.START:
            self._started(line, place)

    def _started(self, line: Line, place: Place) -> None:
        cut = line.fields.get("cut_lines", 0)
        if cut:
            self.report.found(f"{place}: at this start {cut} lines were missing before it")
        elif line.fields.get("after") == "crash":
            self.report.note(f"{place}: the process before it did not end in order")

    def _explain_torn(self, line: Line, place: Place) -> None:
        """A torn line is no damage if the record after it states it."""
        torn, stated = self._torn, line.fields
        is_stated = line.kind == Kind.START and stated.get("note") == TORN
        if is_stated and torn is None:
            self.report.found(f"{place}: the torn line that it records is missing before it")
        if is_stated and torn is not None and stated.get("torn_sha256") == torn.digest:
            self.report.note(f"{torn.place}: {TORN} ({torn.num_bytes} bytes), recorded after it")
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

    def _compare(self) -> None:
        """See that the checkpoint of the head file is here."""
        report, head = self.report, self._head
        if head is None:
            state = "damaged" if self._has_head else "missing"
            report.found(f"{self._log}.head is {state}: it would show if the end was cut off")
        elif head.number > report.signed_lines:
            report.found(
                f"the end was cut off: {self._log}.head has a checkpoint at line {head.number}, "
                f"the last one here is at line {report.signed_lines}"
            )
        elif not self._is_head_here:
            report.found(f"{self._log}.head is no checkpoint of this log (line {head.number})")


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _digest(value: object) -> bytes:
    try:
        return bytes.fromhex(str(value))
    except ValueError:
        return GENESIS
