"""The list of requests, a part at a time, and their figures over time.

Pages of the list are cut at numbers of requests, so that rows stay where they are while new ones
come. All requests are looked at in slices, between which the gateway serves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from aiohttp import web

from prfaas.console.request_series import RequestSeries, link_shares, step_of
from prfaas.errors import RequestError
from prfaas.gateway.console.history import History
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.http.request_body import query_number
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.telemetry.request_records import Records, RequestRecord, as_json, course_of
from prfaas.units import NS_PER_MS

ROWS_MAX = 200
SLICE = 50
"""Requests looked at in a row: well under a millisecond."""
QUERIES_MAX = 8
_NUMBER_MAX = 2**53
Numbered = tuple[int, RequestRecord]


class RequestPages:
    """Addresses of the list and the figures of one gateway.

    Args:
        history: The last hour of its links.
    """

    def __init__(self, records: Records, history: History) -> None:
        self._records, self._history = records, history
        self._num_queries = 0

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/console/api/requests", self._list)
        router.add_get("/console/api/requests/series", self._series)

    async def _list(self, request: web.Request) -> web.Response:
        """Rows below the number `before`, the newest first, or those with `numbers`.

        Without `before` also how many there are of each value that can be filtered by.
        """
        wanted = RequestFilter.of(request.query)
        newest = self._records.num_added
        if numbers := request.query.get("numbers"):
            return _packed({"newest": newest, "requests": _rows(self._numbered(_whole(numbers)))})
        before = query_number(request, "before", _NUMBER_MAX, 1, _NUMBER_MAX)
        after = query_number(request, "after", 0, 0, _NUMBER_MAX)
        limit = query_number(request, "limit", ROWS_MAX, 1, ROWS_MAX)
        facets = Facets() if before == _NUMBER_MAX else None
        rows: list[Numbered] = []
        num_found = num_seen = 0
        async for number, record in self._newest_first(after):
            num_seen += 1
            if facets is not None:
                facets.add(record)
            if number >= before or not wanted.takes(record):
                continue
            num_found += 1
            if len(rows) < limit:
                rows.append((number, record))
        return _packed(
            {
                "newest": newest,
                "num_kept": len(self._records),
                "oldest": self._oldest(),
                "num_seen": num_seen,
                "num_found": num_found,
                "requests": _rows(rows),
                "facets": None if facets is None else facets.as_json(),
            }
        )

    async def _series(self, request: web.Request) -> web.Response:
        """Figures of the requests that a filter takes, in equal steps of its time."""
        wanted = RequestFilter.of(request.query)
        if wanted.since is None or wanted.until is None or wanted.since >= wanted.until:
            raise RequestError("since and until are needed, Unix seconds, since below until")
        series = RequestSeries(wanted.since, wanted.until, step_of(wanted.until - wanted.since))
        async for _, record in self._newest_first():
            if wanted.takes(record):
                series.add(record)
        found = await series.as_json()
        samples = self._history.since(wanted.since)
        found["links"] = link_shares(samples, series.since, series.step_s, series.num_steps)
        return _packed(found)

    def _oldest(self) -> float | None:
        """Instant at which the oldest request that is kept came in."""
        oldest = next(self._records.oldest_first(), None)
        return None if oldest is None else oldest.started_unix_s

    async def _newest_first(self, after: int = 0) -> AsyncIterator[Numbered]:
        """All requests above a number with theirs, as they were at the call."""
        if self._num_queries >= QUERIES_MAX:
            raise RequestError(
                f"{QUERIES_MAX} lists of requests are being made, which is the limit; ask again",
                status=429,
            )
        self._num_queries += 1
        try:
            number = self._records.num_added
            kept = list(islice(self._records.newest_first(), max(number - after, 0)))
            for begin in range(0, len(kept), SLICE):
                for record in kept[begin : begin + SLICE]:
                    yield number, record
                    number -= 1
                await asyncio.sleep(0)
        finally:
            self._num_queries -= 1

    def _numbered(self, numbers: set[int]) -> list[Numbered]:
        """Records of these numbers that are still kept."""
        newest, found = self._records.num_added, []
        for place, record in enumerate(self._records.newest_first()):
            if newest - place in numbers:
                found.append((newest - place, record))
        return found


@dataclass(slots=True)
class Facets:
    """Number of requests by each value that can be filtered by."""

    counts: dict[str, Counter[str]]

    def __init__(self) -> None:
        names = "tenant", "path", "reason", "outcome", "engine", "course"
        self.counts = {name: Counter() for name in names}

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        counts = self.counts
        counts["tenant"][record.tenant] += 1
        counts["path"][record.path] += 1
        counts["outcome"][record.outcome.value] += 1
        counts["reason"].update(reasons_of(record))
        counts["engine"].update(engines_of(record))
        counts["course"].update(course_of(record))

    def as_json(self) -> JsonObject:
        """The values of each, with their counts, the most frequent first."""
        return {name: dict(found.most_common()) for name, found in self.counts.items()}


def _rows(found: Iterable[Numbered]) -> list[JsonObject]:
    return [as_json(record) | {"number": number} for number, record in found]


def _whole(text: str) -> set[int]:
    """Numbers of requests, parted by commas; RequestError if one is none, or they are many."""
    parts = text.split(",", ROWS_MAX)
    if len(parts) > ROWS_MAX or not all(part.isdecimal() and len(part) < 16 for part in parts):
        raise RequestError(f"numbers must be at most {ROWS_MAX} whole numbers, parted by commas")
    return {int(part) for part in parts}


def _packed(body: JsonObject) -> web.Response:
    response = json_response(body)
    response.enable_compression()
    return response


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
