"""The log of incidents: the book in memory, and its file, which a thread reads and writes.

The event loop never waits for the disk. While the file cannot be written, incidents stay in memory,
an alarm is shown, and writing is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import CollectorRegistry

from prfaas.incidents.alarm_kinds import Kind, Severity
from prfaas.incidents.book import IncidentBook
from prfaas.incidents.incident import Incident
from prfaas.incidents.store import Earlier, IncidentStore, Query, StoreFault, row_of
from prfaas.logs import log_event
from prfaas.series import Families

T = TypeVar("T")
_log = logging.getLogger(__name__)

SEEN_EVERY_S = 10.0
"""Time between two notes that this process runs."""
RETRY_S = 5.0
DISK_S = 5.0
"""Time that a reader, or the end of the process, waits for the disk."""


class IncidentMetrics:
    """Metrics of the log of incidents."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Families(registry)
        self.failing = make.gauge(
            "gateway_incidents_failing", "1 while the log of incidents cannot be written."
        )
        self.lost = make.counter(
            "gateway_incidents_lost", "Incidents that were forgotten before they could be written."
        )


class IncidentLog:
    """The log of one gateway.

    Args:
        began_at: Start of the gateway, Unix seconds.
    """

    def __init__(
        self,
        book: IncidentBook,
        store: IncidentStore,
        metrics: IncidentMetrics,
        gateway: str,
        began_at: float,
    ) -> None:
        self.book, self._store, self._metrics = book, store, metrics
        self._gateway, self._began_at = gateway, began_at
        self.why_unwritten = ""
        self._thread = ThreadPoolExecutor(1, "incidents")
        self._writing: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_closed = False
        self._seen_at = self._retry_at = 0.0
        self._num_lost = 0

    def flush(self) -> None:
        """Write what has changed, if nothing is being written."""
        now = time.time()
        lost, self._num_lost = self.book.num_lost - self._num_lost, self.book.num_lost
        self._metrics.lost.inc(lost)
        is_due = self.book.unwritten or now - self._seen_at >= SEEN_EVERY_S
        if self._writing is None and is_due and now >= self._retry_at:
            self._writing = asyncio.create_task(self._write(now))

    async def written(self) -> None:
        """Wait until everything up to now is written, or could not be."""
        while self._writing is not None:
            await self._writing
        if self.book.unwritten:
            await self._write(time.time())

    async def find(self, query: Query) -> list[Incident]:
        """Return incidents, those that are only in memory included."""
        memory = {each.id: each for each in self.book.recent.values() if query.has(each)}
        found = await self._read(lambda: self._store.find(query)) or []
        known = {each.id: each for each in found if each.id not in self.book.recent} | memory
        ordered = sorted(known.values(), key=lambda each: each.began_at, reverse=True)
        return ordered[: query.limit]

    async def get(self, incident_id: str) -> Incident | None:
        """Return the incident whose id this is, or begins so."""
        close = [each for i, each in self.book.recent.items() if i.startswith(incident_id)]
        if len(close) == 1:
            return close[0]
        return await self._read(lambda: self._store.get(incident_id))

    async def close(self) -> None:
        """Write the rest, and note that the gateway ends in order."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(DISK_S):
                await self.written()
                await self._on_thread(lambda: self._store.close(time.time()))
        except TimeoutError:
            log_event(_log, logging.ERROR, "incidents_unwritten", why="the disk does not answer")
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, ask: Callable[[], T]) -> T | None:
        """Ask the file; None if it cannot be read in time."""
        try:
            async with asyncio.timeout(DISK_S):
                return await self._on_thread(ask)
        except (StoreFault, TimeoutError) as error:
            self._failed(str(error) or "the disk does not answer")
            return None

    async def _write(self, now: float) -> None:
        taken, self.book.unwritten = self.book.unwritten, {}
        try:
            if not self._is_open:
                self._opened(await self._on_thread(self._store.open))
            rows = [row_of(each) for each in taken.values()]
            await self._on_thread(lambda: self._store.write(rows, now))
            self._worked(now)
        except StoreFault as error:
            self._failed(str(error))
            known = {i: each for i, each in taken.items() if i in self.book.recent}
            self.book.num_lost += len(taken) - len(known)
            self.book.unwritten = known | self.book.unwritten
        finally:
            self._writing = None

    def _opened(self, earlier: Earlier) -> None:
        self._is_open = True
        if earlier.seen_at is None:
            return
        began_at = self._began_at
        self.book.carry(earlier.incidents, earlier.seen_at, began_at)
        name, severity, words = "gateway_killed", Severity.CRITICAL, "it did not end in order"
        if earlier.was_stopped:
            name, severity, words = "gateway_stopped", Severity.NOTE, "it was stopped in order"
        cause = f"gateway {self._gateway} was not running: {words}"
        at = min(earlier.seen_at, began_at)
        self.book.note(name, Kind.GATEWAY, self._gateway, cause, at, severity).ended_at = began_at

    def _worked(self, now: float) -> None:
        if self.why_unwritten:
            log_event(_log, logging.INFO, "incidents_written_again")
        self.why_unwritten, self._seen_at, self._retry_at = "", now, 0.0
        self._metrics.failing.set(0)

    def _failed(self, why: str) -> None:
        if why != self.why_unwritten:
            log_event(_log, logging.ERROR, "incidents_unwritten", why=why)
        self.why_unwritten, self._retry_at = why, time.time() + RETRY_S
        self._metrics.failing.set(1)

    def _on_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)
