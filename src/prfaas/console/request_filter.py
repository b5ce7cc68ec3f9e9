"""Filters of the list of requests, as they stand in an address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from prfaas.errors import RequestError
from prfaas.gateway.telemetry.request_records import RequestRecord, course_of
from prfaas.units import NS_PER_MS

VALUE_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions on the requests of a list; empty texts and None ask for nothing.

    Attributes:
        reason: Of its decision, its refusal, or its last fallback.
        engine: One that worked for it.
        course: A word of `course_of`.
        id: Beginning of its id.
        since, until: Unix seconds within which it came in.
        ttft_min, e2e_min: Milliseconds that it took at least; a request that runs has none yet.
    """

    tenant: str = ""
    path: str = ""
    reason: str = ""
    outcome: str = ""
    engine: str = ""
    course: str = ""
    id: str = ""
    since: float | None = None
    until: float | None = None
    ttft_min: float | None = None
    e2e_min: float | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> RequestFilter:
        """Read it from the query of an address; RequestError if a value is no number or long."""
        found: dict[str, Any] = {}
        for each in fields(cls):
            text = query.get(each.name, "")[: VALUE_CHARS_MAX + 1]
            if len(text) > VALUE_CHARS_MAX:
                message = f"{each.name} has more than {VALUE_CHARS_MAX} characters"
                raise RequestError(message, param=each.name)
            if text:
                found[each.name] = (
                    text if isinstance(each.default, str) else _number(each.name, text)
                )
        return cls(**found)

    def takes(self, record: RequestRecord) -> bool:
        """Return True for a request that is to be listed."""
        return (
            (self.since is None or record.started_unix_s >= self.since)
            and (self.until is None or record.started_unix_s < self.until)
            and self.tenant in ("", record.tenant)
            and self.path in ("", record.path)
            and self.outcome in ("", record.outcome.value)
            and (not self.engine or self.engine in engines_of(record))
            and (not self.course or self.course in course_of(record))
            and (not self.reason or self.reason in reasons_of(record))
            and (not self.id or record.request_id.startswith(self.id))
            and _lasts(record.ttft_ns, self.ttft_min)
            and _lasts(record.e2e_ns, self.e2e_min)
        )


def engines_of(record: RequestRecord) -> set[str]:
    """Engines that have worked for a request."""
    names = record.prefill_engine, record.prefilled_by, record.decode_engine
    return {name for name in names if name is not None}


def reasons_of(record: RequestRecord) -> set[str]:
    """Labels of why it went where it went."""
    found = {record.decision.reason.value} if record.decision else set()
    refusal = record.refusal.value if record.refusal else record.rejected
    return found | ({refusal} if refusal else set()) | {each.reason for _, each in record.fallbacks}


def _lasts(duration_ns: int | None, least_ms: float | None) -> bool:
    return least_ms is None or (duration_ns is not None and duration_ns >= least_ms * NS_PER_MS)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise RequestError(f"{name} must be a number of at least 0, got {text!r}", param=name)
    return value
