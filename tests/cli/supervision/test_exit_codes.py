"""Exit codes of commands that a signal ends, as the shell sees them: real processes."""

import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.cli.supervision.control import SOCKET_NAME
from prfaas.config.load import load_deployment
from prfaas.engines.checkpoint import make_tokenizer
from prfaas.wire.identity import make_authority, make_identity
from tests.cli.conftest import Start
from tests.cli.running_parts import until
from tests.cli.started_commands import said
from tests.deployments import LAPTOP, TIMING, placed

CLEAN, EARLY = 0, 128
pytestmark = pytest.mark.timeout(300)
CASE_STUDY = Path(__file__).parents[3] / "examples" / "plan" / "paper-case-study.toml"


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def ended(process: subprocess.Popen[str], number: signal.Signals, tmp_path: Path) -> int:
    """Send a signal; the exit code, without a traceback."""
    process.send_signal(number)
    code = process.wait(100)
    assert "Traceback" not in said(tmp_path)
    assert "Aborted!" not in said(tmp_path)
    return code


@SIGNALS
def test_a_deployment_that_runs_stops_in_good_order(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    file, _ = placed(TIMING, tmp_path)
    process = start("up", file)
    until(lambda: "ready at" in said(tmp_path) or process.poll() is not None, 200)
    assert process.poll() is None, said(tmp_path)
    assert (tmp_path / "state" / SOCKET_NAME).exists()
    assert ended(process, number, tmp_path) == CLEAN
    assert not (tmp_path / "state" / SOCKET_NAME).exists()


@SIGNALS
@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_deployment_that_starts_was_not_done(
    start: Start, tmp_path: Path, command: str, number: signal.Signals
) -> None:
    from prfaas.engines.checkpoint import make_tokenizer

    # Nobody answers there, and it may take long: the start goes on until it is stopped.
    file, _ = placed(LAPTOP, tmp_path)
    text = file.read_text().replace("generate = true        #", "generate = false       #")
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    head, mark, tail = text.partition("[clusters.pd.pools.pd-pool]\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f'address = "127.0.0.1:{silent.getsockname()[1]}"\n'
        file.write_text(head + mark + place + tail.replace('memory = "512MiB"\n', ""))
        process = start(command, file)
        until(lambda: "starting" in said(tmp_path) or process.poll() is not None, 100)
        assert process.poll() is None, said(tmp_path)
        assert ended(process, number, tmp_path) == EARLY + number


@SIGNALS
def test_a_pool_node_a_timing_engine_and_a_link_server_stop_in_good_order(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    make_authority(tmp_path)
    make_identity(tmp_path, "pd-pool")
    make_tokenizer(tmp_path / "model")
    pool = ["pool", "--name", "pd-pool", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    pool += ["--socket", str(tmp_path / "pool.sock"), "--identities", str(tmp_path)]
    link = ["link", "serve", "pd-pool", "--source", "other", "--listen", "127.0.0.1:0"]
    link += ["--identities", str(tmp_path)]
    timing = ["engine", "timing", "--engine", "e0=127.0.0.1:0", "--plan", str(CASE_STUDY)]
    timing += ["--model", "timing-1t", "--model-path", str(tmp_path / "model")]
    stops(start(*pool), (tmp_path / "pool.sock").exists, number, tmp_path)
    stops(start(*link), lambda: "takes link tests at" in said(tmp_path), number, tmp_path)
    stops(start(*timing), lambda: "timing engine e0 at" in said(tmp_path), number, tmp_path)


@SIGNALS
def test_a_gateway_stops_in_good_order(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    file, _ = placed(TIMING, tmp_path)
    deployment = load_deployment(file)
    make_authority(deployment.security.identities)
    make_identity(deployment.security.identities, "gateway")
    make_tokenizer(Path(deployment.model.path))
    args = ["gateway", str(file)]
    for cluster in deployment.clusters.values():
        args += [
            word for name in cluster.engines for word in ("--engine", f"{name}=http://[::1]:9")
        ]
        args += [word for name in cluster.pools for word in ("--pool", f"{name}=[::1]:9")]
    stops(start(*args), lambda: "listens at" in said(tmp_path), number, tmp_path)


def stops(
    process: subprocess.Popen[str],
    is_up: Callable[[], bool],
    number: signal.Signals,
    tmp_path: Path,
) -> None:
    until(lambda: is_up() or process.poll() is not None, 100)
    assert process.poll() is None, said(tmp_path)
    assert ended(process, number, tmp_path) == CLEAN


def test_a_command_that_is_not_done_ends_as_a_shell_shows_it(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = start("ctl", "status", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        with connection:
            assert ended(process, signal.SIGINT, tmp_path) == EARLY + signal.SIGINT


def test_wrong_usage_is_an_operators_mistake(start: Start, tmp_path: Path) -> None:
    assert start("up", "--nonsense").wait(60) == 2
    assert "No such option" in said(tmp_path)
    assert start("--version").wait(60) == 0
