"""Sweeps: jobs in this process, in others, and what becomes of them when a worker is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.plan.simulate_command import simulate
from prfaas.errors import ConfigError
from prfaas.sweeps import RUNS_MAX, JobError, SweepJob, SweepPlace, run_jobs
from tests.sim.systems import EXAMPLES

from . import jobs
from .commands import SWEEP, digests


@pytest.mark.timeout(300)
def test_a_sweep_has_the_same_digests_in_one_process_and_in_several() -> None:
    alone = digests("--jobs", "1")
    assert len({*alone["paper"], *alone["remote"]}) == 4
    assert digests("--jobs", "2") == alone


@pytest.mark.timeout(120)
def test_a_killed_worker_loses_no_job(tmp_path: Path) -> None:
    found = list(run_jobs(jobs.squares(tmp_path, fatal=3, times=1), SweepPlace(2)))
    assert sorted(found) == [(i, i * i) for i in range(8)]
    assert jobs.runs(tmp_path, 3) == 2
    assert all(jobs.runs(tmp_path, i) <= 2 for i in range(8))


@pytest.mark.timeout(120)
def test_a_job_that_ends_every_worker_is_given_up_and_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"{RUNS_MAX} workers were lost that ran .*square of 3"):
        list(run_jobs(jobs.squares(tmp_path, fatal=3, times=99), SweepPlace(2)))
    assert jobs.runs(tmp_path, 3) == RUNS_MAX


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_names_the_job_with_its_settings(num_workers: int) -> None:
    quotients = [SweepJob(f"1 over {i}", partial(jobs.divide, i)) for i in (2, 1, 0)]
    with pytest.raises(JobError) as failed:
        list(run_jobs(quotients, SweepPlace(num_workers)))
    assert str(failed.value).startswith("the job 1 over 0 failed: ZeroDivisionError: ")
    assert "jobs.py" in str(failed.value)
    with pytest.raises(ConfigError, match="a fleet of 7: 7 is no number of instances"):
        list(run_jobs([SweepJob("a fleet of 7", partial(jobs.refuse, 7))], SweepPlace(num_workers)))


def test_results_come_as_they_are_made_and_the_rest_is_left_when_nobody_asks() -> None:
    made = run_jobs(
        [SweepJob(f"1 over {i}", partial(jobs.divide, i)) for i in range(2, 99)], SweepPlace(1)
    )
    assert next(made) == (0, 0.5)
    made.close()  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
def test_ctrl_c_ends_a_sweep_and_its_workers_without_a_traceback() -> None:
    # Its own session stands for a terminal: Ctrl-C signals the command and its workers.
    words = [sys.executable, "-m", "prfaas", "simulate", str(EXAMPLES / "paper-poisson.toml")]
    words += ["--seeds", "20", "--jobs", "2"]
    # A job in the background ignores Ctrl-C, and its commands inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not workers_of(command.pid):
        assert command.poll() is None
        time.sleep(0.05)
    os.killpg(command.pid, signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 130
    assert "Traceback" not in errors
    while members(command.pid):
        time.sleep(0.05)


def workers_of(session: int) -> list[int]:
    """Processes of a session that take jobs."""
    return [pid for pid in members(session) if b"loky" in command_line(pid)]


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray", "nowhere"], "'nowhere' is not the address of a Ray cluster"),
        (["--ray", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1: Connection refused"),
    ],
)
def test_a_ray_cluster_that_is_not_there_is_named(words: list[str], message: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'prfaas[ray]'")
    made = CliRunner().invoke(simulate, [*SWEEP, "--seeds", "2", *words])
    assert isinstance(made.exception, ConfigError)
    assert message in str(made.exception)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    made = CliRunner().invoke(simulate, [*SWEEP, "--seeds", "2", "--ray", "auto"])
    assert isinstance(made.exception, ConfigError)
    assert "pip install 'prfaas[ray]'" in str(made.exception)


@pytest.mark.timeout(300)
def test_policies_run_in_several_processes_as_in_one() -> None:
    command = [str(EXAMPLES / "two-clusters.toml"), "--policy", "paper", "--policy", "remote"]
    alone, apart = (
        CliRunner().invoke(simulate, [*command, "--json", "--jobs", each]) for each in ("1", "2")
    )
    assert alone.exit_code == 0, alone.output
    assert json.loads(alone.stdout) == json.loads(apart.stdout)


def test_a_place_without_a_sweep_is_refused() -> None:
    made = CliRunner().invoke(simulate, [*SWEEP[:-2], "--jobs", "2"])
    assert made.exit_code == 2
    assert "--jobs and --ray belong to --seeds, --sweep or several" in made.output
