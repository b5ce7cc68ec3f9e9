"""Queries of audit logs: which records, and their sums.

Times are ISO 8601 in UTC with microseconds, so that their order is that of texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from prfaas.core.audit.chain import Line
from prfaas.core.audit.records import RecordKind
from prfaas.errors import ConfigError


def time_text(unix_ns: int) -> str:
    """Unix nanoseconds as text."""
    seconds, rest_ns = divmod(unix_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"


def instant(text: str) -> str:
    """A time as in the lines.

    Args:
        text: ISO 8601; without an offset it is UTC.

    Raises:
        ConfigError: It is no time.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text[:80]!r} is no time; write 2026-11-23T08:00, in UTC") from None
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return f"{found:%Y-%m-%dT%H:%M:%S}.{found.microsecond:06d}Z"


FRAME = frozenset({"n", "hash", "sig"})
"""Fields of every line that say nothing about its record."""
_FILES = frozenset({RecordKind.FILE, RecordKind.CHECKPOINT})
_BYTE_FIELDS = ("bytes", "link_bytes", "wire_bytes")


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that a record has to meet; None and empty ones are met by all.

    Attributes:
        since: Earliest time, ISO 8601 in UTC as in the lines.
        until: Time before which a record has to be.
        kinds: Kinds; without any, all but lines of the log's own book-keeping.
        tenant: Beginning of a tenant class, or a tenant's name.
        outcome: Of a movement, or the reason of a refusal.
        source: Sending pool of a movement, or pool that a purge is about.
        operator: Name of the operator's key.
        transfer: Beginning of the id of a ticket and its transfer.
    """

    since: str | None = None
    until: str | None = None
    kinds: frozenset[str] = frozenset()
    tenant: str | None = None
    outcome: str | None = None
    source: str | None = None
    operator: str | None = None
    transfer: str | None = None

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
    """Records and bytes, by what they have in common.

    Attributes:
        rows: By kind, direction, sender, receiver and outcome: records, then `bytes`,
            `link_bytes` and `wire_bytes`.
    """

    rows: dict[tuple[str, str, str, str, str], list[int]] = field(default_factory=dict)

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
