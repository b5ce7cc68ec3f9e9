"""The file of incidents: what survives, what is refused, and what a broken disk costs."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from prfaas.incidents.alarm_kinds import Kind, Severity
from prfaas.incidents.book import IncidentBook
from prfaas.incidents.incident import Incident
from prfaas.incidents.log import IncidentLog, IncidentMetrics
from prfaas.incidents.store import IncidentStore, Query, StoreFault, row_of

T = 1_000_000.0
NOW = time.time()


def incident(number: int, ended: float | None = None, kind: Kind = Kind.ENGINE) -> Incident:
    return Incident(
        f"{number:08x}", "engine_down", kind, "e", Severity.CRITICAL, T + number, "gone", ended
    )


def ids(found: list[Incident]) -> list[int]:
    return [int(each.id, 16) for each in found]


def test_a_process_that_was_killed_leaves_its_open_incidents(tmp_path: Path) -> None:
    first = IncidentStore(tmp_path, "g")
    assert first.open().seen_at is None
    first.write([row_of(incident(1)), row_of(incident(2, T + 9))], T + 20)
    os.close(os.dup(first._lock))
    first._drop()  # as the death of its process does
    os.close(first._lock)
    second = IncidentStore(tmp_path, "g")
    earlier = second.open()
    assert (ids(list(earlier.incidents)), earlier.seen_at) == ([1], T + 20)
    assert not earlier.was_stopped
    second.close(T + 30)
    third = IncidentStore(tmp_path, "g")
    assert third.open().was_stopped
    assert ids(third.find(Query())) == [2, 1]
    third.close(T + 31)


def test_a_row_of_another_version_hides_no_other(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g")
    store.open()
    row = row_of(incident(2))
    strange = row[4].replace(b'"engine"', b'"moon"')
    assert strange != row[4]
    store.write([row_of(incident(1)), (*row[:4], strange)], T)
    assert ids(store.find(Query())) == [1]
    assert store.get(row[0]) is None
    store.close(T)
    again = IncidentStore(tmp_path, "g")
    assert ids(list(again.open().incidents)) == [1]
    again.close(T)


def test_two_processes_of_one_name_have_two_files(tmp_path: Path) -> None:
    first, second = IncidentStore(tmp_path, "g"), IncidentStore(tmp_path, "g")
    first.open()
    second.open()
    first.write([row_of(incident(1))], T)
    second.write([row_of(incident(2))], T)
    assert ids(first.find(Query())) == [1]
    assert ids(second.find(Query())) == [2]
    first.close(T)
    second.close(T)
    third = IncidentStore(tmp_path, "g")
    assert ids(list(third.open().incidents)) == [1]
    third.close(T)


def test_queries(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g")
    found = [incident(1, T + 5), incident(2), incident(30, T + 31, Kind.LINK)]
    store.write([row_of(each) for each in found], T)
    for query, expected in [
        (Query(), [30, 2, 1]),
        (Query(since=T + 6), [30, 2]),
        (Query(until=T + 10), [2, 1]),
        (Query(kind="link"), [30]),
        (Query(is_open=True), [2]),
        (Query(limit=1), [30]),
    ]:
        assert ids(store.find(query)) == expected
        if query.limit > 1:
            assert [int(each.id, 16) for each in found[::-1] if query.has(each)] == expected
    assert store.get("0000001e") == found[2]
    assert store.get("0000000") is None  # several begin so
    store.close(T)


def test_rows_and_days_are_bounded(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g", rows_max=10, days=1.0)
    store.write([row_of(incident(n, T + n)) for n in range(100)], T)
    assert ids(store.find(Query())) == list(range(99, 89, -1))
    store.write([row_of(incident(90_000, T + 90_000))], T + 90_000)
    assert ids(store.find(Query())) == [90_000]
    store.close(T)


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g")
    store.open()
    for path, mode in [("incidents", 0o700), ("incidents/g.sqlite3", 0o600)]:
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == mode
    store.close(T)


def test_a_damaged_file_is_kept_aside(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g")
    store.write([row_of(incident(1))], T)
    store.close(T)
    (tmp_path / "incidents" / "g.sqlite3").write_bytes(os.urandom(8192))
    store = IncidentStore(tmp_path, "g")
    store.write([row_of(incident(2))], T)
    assert ids(store.find(Query())) == [2]
    assert len(list((tmp_path / "incidents").glob("g.*.broken"))) == 1
    store.close(T)


def test_a_file_that_somebody_removes_is_begun_anew(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g")
    store.write([row_of(incident(1))], T)
    for path in (tmp_path / "incidents").glob("g.sqlite3*"):
        path.unlink()
    store.write([row_of(incident(2))], T)
    assert ids(store.find(Query())) == [2]
    store.close(T)


def test_a_full_disk_is_a_fault_and_writes_nothing(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g", pages_max=12)
    with pytest.raises(StoreFault, match="full"):
        store.write([row_of(incident(n)) for n in range(1000)], T)
    assert ids(store.find(Query())) == []
    store.close(T)


@asynccontextmanager
async def logging_to(state: Path) -> AsyncIterator[tuple[IncidentLog, IncidentMetrics]]:
    metrics = IncidentMetrics(CollectorRegistry())
    log = IncidentLog(IncidentBook(NOW, 0.0), IncidentStore(state, "g"), metrics, "g", NOW)
    yield log, metrics
    await log.close()


def failing(metrics: IncidentMetrics) -> float:
    [family] = metrics.failing.collect()
    return family.samples[0].value


async def test_a_broken_disk_is_an_alarm_and_nothing_is_lost(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("no directory")
    async with logging_to(state) as (log, metrics):
        made = log.book.note("member", Kind.MEMBER, "m", "joined", NOW)
        await log.written()
        assert "state" in log.why_unwritten
        assert failing(metrics) == 1
        assert await log.find(Query()) == [made]  # from memory
        assert await log.get(made.id) == made
        state.unlink()
        await log.written()
        assert (log.why_unwritten, failing(metrics)) == ("", 0)
    store = IncidentStore(state, "g")
    assert store.find(Query()) == [made]
    store.close(NOW)


async def test_an_answer_has_what_is_not_written_yet(tmp_path: Path) -> None:
    async with logging_to(tmp_path) as (log, _):
        old = log.book.note("member", Kind.MEMBER, "a", "joined", NOW)
        await log.written()
        old.step(NOW + 1, "more")
        new = log.book.note("member", Kind.MEMBER, "b", "joined", NOW + 2)
        assert await log.find(Query()) == [new, old]


async def test_a_gateway_that_was_killed_is_an_incident(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, "g")
    store.write([row_of(incident(-5 & 0xFFFF))], NOW - 60)
    store._drop()
    os.close(store._lock)
    async with logging_to(tmp_path) as (log, _):
        log.flush()
        await log.written()
        names = {each.name: each for each in await log.find(Query())}
        killed = names["gateway_killed"]
        assert (killed.began_at, killed.ended_at) == (NOW - 60, NOW)
        log.book.look([], NOW + 1)
        await log.written()
        assert await log.find(Query(is_open=True)) == []
    async with logging_to(tmp_path) as (log, _):
        log.flush()
        await log.written()
        assert "gateway_stopped" in {each.name for each in await log.find(Query())}


async def test_another_process_that_has_the_file_for_long_fails_nothing(tmp_path: Path) -> None:
    async with logging_to(tmp_path) as (log, _):
        await log._on_thread(log._store.open)
        other = sqlite3.connect(tmp_path / "incidents" / "g.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        made = log.book.note("member", Kind.MEMBER, "m", "joined", NOW)
        await log.written()
        assert "locked" in log.why_unwritten
        other.execute("ROLLBACK")
        other.close()
        await log.written()
        assert not log.why_unwritten
        assert await asyncio.to_thread(log._store.find, Query()) == [made]
