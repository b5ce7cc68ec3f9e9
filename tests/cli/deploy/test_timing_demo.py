"""`prfaas demo` with timing engines: its table, and what is left of it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.cli.deploy.demo_table import IF_LOCAL, DemoRow, table_of, timing_requests
from prfaas.cli.deploy.timing_demo import FOLDER_CHARS_MAX, PORT, gateway_port, own_folder
from prfaas.errors import ConfigError

from .demo_rows import RECORD, printed_at

TABLE, TRAFFIC = "document of 24K", "Sample traffic goes on"


class Demo:
    """A demo in an empty folder, with a folder of its own for temporary files."""

    def __init__(self, local: Path, *options: str) -> None:
        self.work = local / "work"
        self.work.mkdir()
        # As long as it may be: the paths of sockets in it have a limit.
        short = tempfile.mkdtemp(dir="/tmp")
        self.temporary = Path(short.ljust(FOLDER_CHARS_MAX, "x"))
        Path(short).rename(self.temporary)
        env = os.environ | {"TMPDIR": str(self.temporary), "HOME": "/nonexistent", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prfaas", "demo", *options],
            cwd=self.work,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.shown = ""

    def read_until(self, text: str) -> None:
        """Read what it prints until there is this text."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + 120
        while text not in self.shown:
            left = deadline - time.monotonic()
            assert select.select([self.process.stdout], [], [], left)[0], self.shown
            piece = os.read(self.process.stdout.fileno(), 2**16)
            assert piece, self.shown
            self.shown += piece.decode()

    def end(self, *signals: signal.Signals) -> int:
        """Signal it; its exit code, once nothing of it is left."""
        for number in signals:
            self.process.send_signal(number)
            if number is not signals[-1]:
                self.read_until("stopping")
        rest, _ = self.process.communicate(timeout=100)
        self.shown += rest.decode()
        return self.process.returncode

    def leaves_nothing(self) -> bool:
        """True once nothing of it is left; False after 30 s."""
        deadline = time.monotonic() + 30
        while self.leftovers() and time.monotonic() < deadline:
            os.sched_yield()
        return not self.leftovers()

    def leftovers(self) -> list[str]:
        """Files, and processes whose working directory is a folder of the demo."""
        found = [str(path) for each in (self.work, self.temporary) for path in each.iterdir()]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                place = (process / "cwd").readlink()
            except OSError:
                continue
            if str(place).startswith(str(self.temporary)):
                found.append(f"process {process.name}")
        return found


@contextmanager
def demo(local: Path, *options: str) -> Iterator[Demo]:
    local.mkdir(exist_ok=True)
    started = Demo(local, *options)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGTERM)
        shutil.rmtree(started.temporary)


def test_it_shows_a_table_and_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path, "--once") as run:
        assert run.end() == 0, run.shown
        assert run.leftovers() == []
    assert "compute nothing" in run.shown
    assert "prfaas demo --engines vllm" in run.shown
    rows = [line for line in run.shown.splitlines() if "against 19,400" in line]
    assert len(rows) == len(timing_requests())
    assert sum("REMOTE" in row for row in rows) == 4


@pytest.mark.parametrize(
    ("phase", "signals", "code"),
    [
        ("starting", [signal.SIGINT], 130),
        ("gateway    gateway          ready", [signal.SIGTERM], 143),
    ],
    ids=["start", "table"],
)
def test_it_leaves_nothing_when_it_is_stopped(
    tmp_path: Path, phase: str, signals: list[signal.Signals], code: int
) -> None:
    with demo(tmp_path) as run:
        run.read_until(phase)
        assert run.end(*signals) == code, run.shown
        assert run.leaves_nothing(), run.leftovers()
    assert "Traceback" not in run.shown


def test_a_second_demo_runs_beside_the_first_and_both_leave_nothing(tmp_path: Path) -> None:
    with demo(tmp_path / "first") as first, demo(tmp_path / "second") as second:
        addresses = set()
        for run in (first, second):
            run.read_until(TRAFFIC)
            [console] = [word for word in run.shown.split() if word.endswith("/console")]
            addresses.add(url := console.removesuffix("/console"))
            option = "" if url.endswith(f":{PORT}") else f" --url {url}"
            assert f"prfaas top{option} " in run.shown
        assert len(addresses) == 2
        assert second.end(signal.SIGINT) == 0, second.shown
        assert first.end(signal.SIGINT, signal.SIGTERM) == 143, first.shown
        assert first.leaves_nothing(), first.leftovers()
        assert second.leaves_nothing(), second.leftovers()


def test_the_port_is_given_to_one_demo_alone() -> None:
    with gateway_port() as first, gateway_port() as second:
        assert first in (0, PORT)
        assert second == 0


def test_a_port_in_use_is_left_alone() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", PORT))
            other.listen()
        except OSError:
            pass  # Somebody else's already.
        with gateway_port() as port:
            assert port == 0


def test_no_place_for_its_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/gone")
    with pytest.raises(ConfigError, match="No such file or directory; set TMPDIR"), own_folder():
        pass


def test_a_long_folder_for_temporary_files_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.chdir(tmp_path)
    with own_folder() as folder:
        assert str(folder.parent) == "/tmp"  # noqa: S108
        assert Path("timing.toml").exists()
    assert not folder.exists()


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_the_table_has_the_local_time_at_every_width(width: int) -> None:
    rows = [DemoRow(timing_requests()[2], [], "a", RECORD, if_local_ms=494.4)]
    head, row = printed_at(table_of(rows, width, IF_LOCAL), width)
    assert "if local" in head
    assert "REMOTE" in row
    assert "494 ms" in row
    assert len(row) <= width
