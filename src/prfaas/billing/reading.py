"""The bill of a period, from the audit logs in some folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from prfaas.audit.query import instant
from prfaas.audit.reading import OnBytes, logs_of, records
from prfaas.core.billing.bill import Bill, BillLine, BillSources
from prfaas.core.transfer.tickets import LIFETIME_MAX_NS
from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S

_TICKETS_BEFORE = timedelta(seconds=2 * LIFETIME_MAX_NS // NS_PER_S)
"""Time before a period in which tickets of its transfers were signed, with a margin."""

Logs = Mapping[str, Mapping[int, Path]]


@dataclass(frozen=True, slots=True)
class Period:
    """Time of a bill.

    Attributes:
        since: First instant, as in the lines; "" is the first line.
        until: Instant after the last one; "" is after the last line.
    """

    since: str = ""
    until: str = ""

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
    """Logs in several folders, such as those of two sites.

    Raises:
        ConfigError: A folder has none, or two folders have logs of one name.
    """
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
