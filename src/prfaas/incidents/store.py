"""Incidents in a file of SQLite, bounded in rows and days.

    STATE/incidents/GATEWAY.sqlite3    of a second gateway with the same name: GATEWAY.1.sqlite3

All methods block; `log.py` calls them on a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prfaas.incidents.incident import Incident
from prfaas.logs import log_event

_log = logging.getLogger(__name__)

FOLDER = "incidents"
VERSION = 1
ROWS_MAX = 10_000
DAYS = 30
SLOTS = 16
"""Gateways with one name and one folder."""
BUSY_S = 2.0
_TABLES = """
CREATE TABLE IF NOT EXISTS incidents (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, began REAL NOT NULL, ended REAL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS began ON incidents (began);
CREATE TABLE IF NOT EXISTS runs (what TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
"""
Row = tuple[str, str, float, float | None, bytes]
_FAULTS = (sqlite3.Error, OSError, msgspec.MsgspecError)


@dataclass(frozen=True, slots=True)
class Query:
    """Which incidents; the newest first.

    Attributes:
        since, until: Those that lasted into this span, Unix seconds.
        kind: Empty for all.
        is_open: Only those that have not ended.
    """

    since: float = 0.0
    until: float = 1e12
    kind: str = ""
    is_open: bool = False
    limit: int = 100

    def has(self, incident: Incident) -> bool:
        """Return True if it asks for an incident."""
        ended = self.until if incident.ended_at is None else incident.ended_at
        is_within = incident.began_at <= self.until and ended >= self.since
        is_kind = not self.kind or incident.kind == self.kind
        return is_within and is_kind and not (self.is_open and incident.ended_at is not None)


@dataclass(frozen=True, slots=True)
class Earlier:
    """State that an earlier process left."""

    incidents: Sequence[Incident] = ()
    """Those that it left open."""
    seen_at: float | None = None
    """Last instant at which it is known to have run; None if there was none."""
    was_stopped: bool = False
    """True if it ended in order."""


class StoreFault(Exception):  # noqa: N818 - a fault of a disk, as an alarm shows it
    """The file cannot be read or written: why, in words."""


class IncidentStore:
    """The file of one gateway.

    Args:
        state: Directory of the deployment's state.
        pages_max: Limit of the file, pages of 4 KiB; 0 is the limit of the disk.
    """

    def __init__(
        self,
        state: Path,
        gateway: str,
        rows_max: int = ROWS_MAX,
        days: float = DAYS,
        pages_max: int = 0,
    ) -> None:
        self._folder, self._gateway = state / FOLDER, gateway
        self._rows_max, self._days, self._pages_max = rows_max, days, pages_max
        self._database: sqlite3.Connection | None = None
        self._lock = -1
        self._locked: Path | None = None
        """File whose lock this process has."""
        self._is_known = False

    def open(self) -> Earlier:
        """Open the file, and return what an earlier process left, once.

        Raises:
            StoreFault: It cannot be opened. It may be tried again.
        """
        try:
            database = self._opened()
            if self._is_known:
                return Earlier()
            rows = database.execute("SELECT body FROM incidents WHERE ended IS NULL").fetchall()
            runs = dict(database.execute("SELECT what, at FROM runs").fetchall())
            self._is_known = True
        except _FAULTS as error:
            raise self._fault(error) from None
        seen, stopped = runs.get("seen"), runs.get("stopped", 0.0)
        return Earlier(list(_incidents(rows)), seen, bool(seen and stopped >= seen))

    def write(self, rows: Sequence[Row], now: float) -> None:
        """Write incidents, and that this process runs; forget what is too old or too much.

        Raises:
            StoreFault: Nothing is written.
        """
        try:
            with (database := self._opened()):
                database.executemany(
                    "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?)",
                    rows,
                )
                self._ran(database, "seen", now)
                if rows:
                    self._forget(database, now)
        except _FAULTS as error:
            raise self._fault(error) from None

    def find(self, query: Query) -> list[Incident]:
        """Return the incidents of a query; StoreFault if they cannot be read."""
        sql = (
            "SELECT body FROM incidents WHERE began <= ? AND (ended IS NULL OR ended >= ?)"
            " AND (? = '' OR kind = ?) AND (NOT ? OR ended IS NULL) ORDER BY began DESC LIMIT ?"
        )
        given = (query.until, query.since, query.kind, query.kind, query.is_open, query.limit)
        try:
            return list(_incidents(self._opened().execute(sql, given).fetchall()))
        except _FAULTS as error:
            raise self._fault(error) from None

    def get(self, found_id: str) -> Incident | None:
        """Return the incident whose id this is, or begins so; StoreFault if it cannot be read."""
        sql = "SELECT body FROM incidents WHERE substr(id, 1, ?) = ? LIMIT 2"
        try:
            rows = self._opened().execute(sql, (len(found_id), found_id)).fetchall()
            return next(_incidents(rows), None) if len(rows) == 1 else None
        except _FAULTS as error:
            raise self._fault(error) from None

    def close(self, now: float) -> None:
        """Note that this process ends in order; never raises."""
        with contextlib.suppress(*_FAULTS):
            if self._database is not None:
                with self._database:
                    self._ran(self._database, "seen", now)
                    self._ran(self._database, "stopped", now)
        self._drop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock, self._locked = -1, None

    def _opened(self) -> sqlite3.Connection:
        if self._locked is not None and not self._locked.exists():
            self._drop()  # somebody removed the file: begin a new one
        if self._database is None:
            path = self._path()
            try:
                self._database = self._connect(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                aside = path.with_suffix(f".{time.time():.0f}.broken")
                path.replace(aside)
                for rest in ("-wal", "-shm"):
                    path.with_name(path.name + rest).unlink(missing_ok=True)
                fields = {"file": str(path), "kept_as": str(aside), "why": str(error)}
                log_event(_log, logging.ERROR, "incidents_unreadable", **fields)
                self._database = self._connect(path)
        return self._database

    def _connect(self, path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
        try:
            path.chmod(0o600)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            if self._pages_max:
                database.execute(f"PRAGMA max_page_count = {self._pages_max:d}")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"version {version}, and not {VERSION}")
            database.executescript(_TABLES)
            database.execute(f"PRAGMA user_version = {VERSION:d}")
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(str(verdict))
        except BaseException:
            database.close()
            raise
        return database

    def _path(self) -> Path:
        """The first file of this name that no running process has."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._locked is not None:
            return self._locked
        for slot in range(SLOTS):
            stem = self._gateway if not slot else f"{self._gateway}.{slot}"
            path = self._folder / f"{stem}.sqlite3"
            lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock, self._locked = lock, path
            return path
        raise OSError(f"{SLOTS} gateways use {self._folder} under the name {self._gateway}")

    def _forget(self, database: sqlite3.Connection, now: float) -> None:
        database.execute("DELETE FROM incidents WHERE ended < ?", (now - self._days * 86400,))
        database.execute(
            "DELETE FROM incidents WHERE id IN "
            "(SELECT id FROM incidents ORDER BY began DESC LIMIT -1 OFFSET ?)",
            (self._rows_max,),
        )

    @staticmethod
    def _ran(database: sqlite3.Connection, what: str, now: float) -> None:
        database.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (what, now))

    def _fault(self, error: Exception) -> StoreFault:
        self._drop()
        return StoreFault(f"{self._folder}: {str(error) or type(error).__name__}")

    def _drop(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def row_of(incident: Incident) -> Row:
    """Return an incident as it is now, to be written."""
    times = incident.began_at, incident.ended_at
    return incident.id, incident.kind.value, *times, msgspec.json.encode(incident)


def _incidents(rows: Iterable[tuple[bytes]]) -> Iterator[Incident]:
    """The incidents of rows, without those that another version wrote and this one cannot read."""
    for (body,) in rows:
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(body, type=Incident)
