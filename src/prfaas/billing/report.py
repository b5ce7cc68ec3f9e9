"""The bill of a period, from audit logs, as a table, CSV or JSON.

Costs and energy are rounded here and nowhere else.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path

from prfaas.audit.chain_file import instant
from prfaas.audit.reading import OnBytes, logs_of, records
from prfaas.core.billing.bill import Bill, BillLine, BillRow, BillSources
from prfaas.core.billing.usage import NAMES
from prfaas.core.transfer.tickets import LIFETIME_MAX_NS
from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S

_TICKETS_BEFORE = timedelta(seconds=2 * LIFETIME_MAX_NS // NS_PER_S)
"""Time before a period in which tickets of its transfers were signed, with a margin."""

Logs = Mapping[str, Mapping[int, Path]]


@dataclass(frozen=True, slots=True)
class Period:
    """Time of a bill."""

    since: str = ""
    """First instant, as in the lines; "" is the first line."""
    until: str = ""
    """Instant after the last one; "" is after the last line."""

    def has(self, at: str) -> bool:
        """Return True if a time is within."""
        return at >= self.since and (not self.until or at < self.until)

    @property
    def tickets_since(self) -> str:
        """Earliest time of a ticket of a transfer within."""
        if not self.since:
            return ""
        return instant((datetime.fromisoformat(self.since) - _TICKETS_BEFORE).isoformat())


@dataclass(slots=True)
class FoundLogs:
    """Logs by name, and the folder of each."""

    logs: dict[str, dict[int, Path]] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)


def logs_in_folders(folders: Sequence[Path]) -> Logs:
    """Logs in several folders, such as those of two sites; ConfigError if a folder has none, or two
    folders have logs of one name."""
    found = FoundLogs()
    for folder in folders:
        for name, files in logs_of(folder).items():
            if name in found.logs:
                raise ConfigError(
                    f"the audit log {name} is in {found.folders[name]} and in {folder}: give one of"
                    " the copies, since a bill counts each log once"
                )
            found.logs[name], found.folders[name] = files, folder
    return found.logs


def make_bill(logs: Logs, period: Period, on_bytes: OnBytes = lambda _: None) -> Bill:
    """The bill of a period. Reads all logs twice.

    Args:
        logs: Files by the name of the log and by number.

    Raises:
        ConfigError: A file cannot be read.
    """
    sources = BillSources(frozenset(logs))
    for line in _lines(logs, on_bytes):
        sources.learn(line, period.tickets_since)
    bill = Bill(sources)
    for line in _lines(logs, on_bytes):
        if period.has(line.at):
            bill.add(line)
    return bill


def _lines(logs: Logs, on_bytes: OnBytes) -> Iterator[BillLine]:
    for name, files in logs.items():
        for line in records(dict(files), on_bytes):
            yield BillLine(name, line.number, str(line.fields.get("at", "")), line.fields)


DIMENSIONS = {"tenant": "tenant", "phase": "phase", "cluster": "cluster", "class": "service"}
"""Fields of a key by their names in reports."""
DIGITS = 6
_JOULES_PER_KWH = 3_600_000
_NS_PER_S = 10**9


def as_csv(bill: Bill, by: Sequence[str]) -> str:
    """All amounts of each row, exact."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*by, *NAMES, "cost", "kwh", "unpriced_records"])
    for key, row in bill.by([DIMENSIONS[name] for name in by]):
        amounts = [getattr(row.amounts, name) for name in NAMES]
        writer.writerow([*map(_cell, key), *amounts, *_worth(row), row.num_unpriced])
    return text.getvalue()


def as_json(bill: Bill, by: Sequence[str], period: Period) -> str:
    """All amounts of each row, and their sum."""
    rows = bill.by([DIMENSIONS[name] for name in by])
    found = {
        "from": period.since or None,
        "to": period.until or None,
        "rows": [dict(zip(by, key, strict=True)) | _row(row) for key, row in rows],
        "total": _row(bill.total()),
        "lost_records": bill.num_lost,
    }
    return json.dumps(found, indent=2) + "\n"


def as_table(bill: Bill, by: Sequence[str]) -> str:
    """Rows for people: an absent amount is empty."""
    heads = [*by, "count", "tokens", "engine s", "slot s", "sent bytes", "on the wire"]
    heads += ["received bytes", "GB h", "kWh", "cost"]
    lines = [
        [*(_printable(part) or "-" for part in key), *_cells(row)]
        for key, row in bill.by([DIMENSIONS[name] for name in by])
    ]
    total = bill.total()
    lines.append(["total", *[""] * (len(by) - 1), *_cells(total)] if by else _cells(total))
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    text = [_line(line, widths, len(by)) for line in [heads, *lines]]
    return "\n".join([*text, *_notes(bill, total)]) + "\n"


def _notes(bill: Bill, total: BillRow) -> list[str]:
    notes = []
    if total.num_unpriced:
        notes.append(f"{total.num_unpriced} records have usage without a price")
    if bill.num_lost:
        notes.append(f"{bill.num_lost} records were not written by their process: they are missing")
    return ["", *notes] if notes else []


def _line(cells: Sequence[str], widths: Sequence[int], num_names: int) -> str:
    aligned = [
        cell.ljust(width) if place < num_names else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _cells(row: BillRow) -> list[str]:
    found, (cost, kwh) = row.amounts, _worth(row)
    gb_hours = Fraction(found.byte_ns, 10**9 * 3600 * _NS_PER_S)
    counts = (
        f"{found.count:,}",
        f"{found.tokens:,}",
        f"{found.engine_ns / _NS_PER_S:,.3f}",
        f"{found.slot_ns / _NS_PER_S:,.3f}",
        f"{found.sent_bytes:,}",
        f"{found.sent_wire_bytes:,}",
        f"{found.received_bytes:,}",
        _decimal(gb_hours),
        kwh,
        cost,
    )
    return ["" if not text.strip("0.,") else text for text in counts]


def _row(row: BillRow) -> dict[str, object]:
    amounts: dict[str, object] = {name: getattr(row.amounts, name) for name in NAMES}
    cost, kwh = _worth(row)
    return amounts | {"cost": cost, "kwh": kwh, "unpriced_records": row.num_unpriced}


def _worth(row: BillRow) -> tuple[str, str]:
    return _decimal(row.cost), _decimal(row.joules / _JOULES_PER_KWH)


def _decimal(value: Fraction) -> str:
    """A decimal text, rounded half to even."""
    scaled = round(value * 10**DIGITS)
    return f"{scaled // 10**DIGITS}.{scaled % 10**DIGITS:0{DIGITS}d}"


def _cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula: names come from records."""
    shown = _printable(text)
    return f"'{shown}" if shown[:1] in ("=", "+", "-", "@") else shown


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
