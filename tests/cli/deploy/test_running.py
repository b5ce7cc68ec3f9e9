"""Real processes of a deployment: they stop when told, and nothing stays when one cannot start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.cli.deploy import topology
from prfaas.cli.main import main
from prfaas.engines.launch import Command
from prfaas.wire.identity import make_authority, make_identity
from tests.cli.running_parts import DEPLOYMENT, PATIENCE_S, until


def mentioning(place: Path) -> list[str]:
    """Command lines of living processes that name a place, this one left out."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(place) in line and int(path.parent.name) != os.getpid():
            lines.append(line)
    return lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_pool_node_stops_when_told_and_removes_its_socket(
    tmp_path: Path, number: signal.Signals
) -> None:
    make_authority(tmp_path)
    make_identity(tmp_path, "pd-pool")
    place = tmp_path / "pool.sock"
    args = ["--name", "pd-pool", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    args += ["--socket", str(place), "--identities", str(tmp_path)]
    command = [sys.executable, "-m", "prfaas", "pool", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(place.exists)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert not place.exists()


def test_a_pool_node_reads_its_identity_again_at_a_hangup(tmp_path: Path) -> None:
    make_authority(tmp_path)
    make_identity(tmp_path, "pd-pool")
    place, log = tmp_path / "pool.sock", tmp_path / "log"
    args = ["--name", "pd-pool", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    args += ["--socket", str(place), "--identities", str(tmp_path)]
    command = [sys.executable, "-m", "prfaas", "pool", *args]
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            until(place.exists)
            process.send_signal(signal.SIGHUP)
            until(lambda: "identity_renewed" in log.read_text())
            (tmp_path / "pd-pool.pem").write_text("no certificate")
            process.send_signal(signal.SIGHUP)
            until(lambda: "identity_kept" in log.read_text())
        finally:
            process.terminate()
    assert process.returncode == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("engine", "said", "code"),
    [
        (
            "print('prfaas: use another block size'); raise SystemExit(2)",
            "use another block size",
            2,
        ),
        ("print('no memory'); raise SystemExit(1)", "no memory", 1),
    ],
)
def test_an_engine_that_can_not_start_takes_everything_down(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    said: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    path = tmp_path / "deployment.toml"
    path.write_text(DEPLOYMENT.replace('"state"', f'"{tmp_path / "state"}"'))
    command = Command([sys.executable, "-S", "-c", engine, str(tmp_path)], dict(os.environ))
    monkeypatch.setattr(topology, "engine_command", lambda *_: command)
    monkeypatch.setattr(sys, "argv", ["prfaas", "up", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    output = capsys.readouterr()
    assert "engine pd-engine" in output.err
    assert said in output.err
    assert "Traceback" not in output.err
    assert "pool node  pd-pool          ready" in output.out
    until(lambda: mentioning(tmp_path) == [])
    assert not (tmp_path / "state" / "pd-pool.sock").exists()
