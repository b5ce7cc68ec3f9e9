"""The thread that writes the audit log: batches, full disks, killed processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.audit.reading import logs_of, records
from prfaas.audit.settings import AuditSettings, OnFull
from prfaas.core.audit.records import TORN

from .damaged_logs import verified
from .writing import ENDLESS, PROCESS, audit_log, limit_files, metric
from .writing import TORN as TORN_MODE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def unlimited() -> Iterator[None]:
    """No limit on the size of files after the test."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.getsignal(signal.SIGXFSZ)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def written(folder: Path) -> list[int]:
    lines = records(logs_of(folder)[PROCESS])
    return [line.fields["bytes"] for line in lines if line.kind == "movement"]


def test_many_records_are_few_writes(tmp_path: Path) -> None:
    log, registry = audit_log(AuditSettings(tmp_path, tmp_path))
    for number in range(3000):
        log.write({"kind": "movement", "bytes": number})
    log.close()

    assert written(tmp_path) == list(range(3000))
    assert metric(registry, "writes_total") < 30
    assert metric(registry, "last_line") == verified(tmp_path).num_lines
    assert verified(tmp_path).unsigned_lines == 0


def test_a_record_is_in_the_file_when_it_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        log, _ = audit_log(AuditSettings(tmp_path, tmp_path, checkpoint_s=3600))
        log.write({"kind": "movement", "bytes": 7})
        assert await log.written()
        found = written(tmp_path)
        log.close()
        return found

    assert asyncio.run(scenario()) == [7]


def test_a_checkpoint_follows_when_its_time_has_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        log, registry = audit_log(AuditSettings(tmp_path, tmp_path, checkpoint_s=0.01))
        log.write({"kind": "movement", "bytes": 7})
        while metric(registry, "signed_line") < 5:  # noqa: ASYNC110 - a gauge
            await asyncio.sleep(0.01)
        log.close()

    asyncio.run(scenario())
    whys = [line.fields.get("why") for line in records(logs_of(tmp_path)[PROCESS])]

    assert whys == [None, None, "start", None, "time", "end"]


@pytest.mark.parametrize("on_full", list(OnFull))
@pytest.mark.usefixtures("unlimited")
def test_a_full_disk_is_reported_and_the_log_goes_on_when_there_is_room(
    tmp_path: Path, on_full: OnFull, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel refuses to let files grow, in the middle of a batch."""
    import resource

    settings = AuditSettings(tmp_path, tmp_path, on_full=on_full, queue_max=100, retry_s=0.01)

    async def scenario() -> None:
        log, registry = audit_log(settings)
        path = logs_of(tmp_path)[PROCESS][1]
        limit_files(path.stat().st_size + 1000)
        for number in range(50):
            log.write({"kind": "movement", "bytes": number})
        while not metric(registry, "failing"):  # noqa: ASYNC110 - a gauge
            await asyncio.sleep(0.01)
        assert log.accepts == (on_full is OnFull.OPEN)
        assert not await log.written()
        for number in range(50, 120):
            log.write({"kind": "movement", "bytes": number})
        assert metric(registry, "lost_records_total") == 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        while metric(registry, "failing"):  # noqa: ASYNC110 - a gauge
            await asyncio.sleep(0.01)
        assert log.accepts
        log.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    report = verified(tmp_path)

    assert written(tmp_path) == list(range(100))
    assert report.is_intact
    assert report.lost_records == 20
    assert "20 records were lost" in report.notes[0]
    assert "audit_log_fails" in caplog.text
    assert f"on_full={on_full.value}" in caplog.text
    assert "audit_log_works_again" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_small_file_system_that_is_full_loses_only_what_it_reports(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        log, registry = audit_log(AuditSettings(tmp_path, tmp_path, checkpoint_lines=100))
        for number in range(1000):
            log.write({"kind": "movement", "bytes": number})
        log.close()
        lost, report = metric(registry, "lost_records_total"), verified(tmp_path)
        found = written(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)  # noqa: S607

    assert not [text for text in report.findings if "cut off" not in text]
    assert found == list(range(len(found)))
    assert len(found) + lost == 1000
    assert lost


def _process(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    args = [sys.executable, "-m", "tests.audit.writing", str(folder), mode]
    process = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_process_killed_in_the_middle_of_a_write_leaves_a_torn_line_that_is_recorded(
    tmp_path: Path,
) -> None:
    with _process(tmp_path, TORN_MODE) as process:
        assert process.wait(60) == -signal.SIGKILL
    content = logs_of(tmp_path)[PROCESS][1].read_bytes()
    broken = verified(tmp_path)
    log, _ = audit_log(AuditSettings(tmp_path, tmp_path))
    log.write({"kind": "movement", "bytes": 1})
    log.close()
    report = verified(tmp_path)

    assert not content.endswith(b"\n")
    assert logs_of(tmp_path)[PROCESS][1].read_bytes().startswith(content)
    assert "it is not complete" in broken.notes[0]
    assert report.is_intact
    assert [text for text in report.notes if TORN in text]
    assert [text for text in report.notes if "did not end in order" in text]


def test_a_process_killed_at_any_time_leaves_a_log_that_is_continued(tmp_path: Path) -> None:
    for _ in range(3):
        with _process(tmp_path, ENDLESS) as process:
            before = verified(tmp_path).num_lines
            while verified(tmp_path).num_lines < before + 200:
                pass
            process.kill()
    log, _ = audit_log(AuditSettings(tmp_path, tmp_path))
    log.close()
    report = verified(tmp_path)

    assert report.is_intact, report.findings
    assert len([text for text in report.notes if "did not end in order" in text]) == 3
