"""Units for systemd and rules for logrotate: read by the real programs, where they are there."""

import re
import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from prfaas.cli.parts.gateway_command import gateway
from prfaas.cli.parts.pool_command import pool
from prfaas.config.deployment import GatewayTable
from prfaas.pool.node.settings import DRAIN_NS
from prfaas.units import NS_PER_S

from .charts import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
EXPOSURE_MAX = {"prfaas-gateway": 20, "prfaas-pool": 20, "prfaas-engine@": 45}
"""In tenths, as `systemd-analyze security --threshold` takes it."""
SYSTEMD, LOGROTATE = shutil.which("systemd-analyze"), shutil.which("logrotate")
needs_systemd = pytest.mark.skipif(not SYSTEMD, reason="systemd-analyze is not installed")
needs_logrotate = pytest.mark.skipif(not LOGROTATE, reason="logrotate is not installed")


class Unit(RawConfigParser):
    """Settings of a unit; the last one of a name."""

    def __init__(self, file: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), interpolation=None)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string(file.read_text())


def here(tmp_path: Path) -> list[str]:
    """The units with a program that is there."""
    found = []
    for file in UNITS:
        text = re.sub(r"/opt/prfaas/bin/\w+", "/bin/true", file.read_text())
        copy = tmp_path / file.name.replace("@", "@pd-a-0")
        copy.write_text(text)
        found.append(str(copy))
    return found


@needs_systemd
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [SYSTEMD or "", "verify", "--man=no", *here(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_units_may_do_little(file: Path) -> None:
    limit = EXPOSURE_MAX[file.stem]
    command = [SYSTEMD or "", "security", "--offline=true", f"--threshold={limit}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_units_keep_shared_memory_and_the_user(file: Path) -> None:
    service = Unit(file)["Service"]
    assert service["User"] == service["Group"] == "prfaas"
    assert "RemoveIPC" not in service, "it would remove the engines' shared memory"
    assert int(service["LimitNOFILE"]) >= 65536
    assert service["UMask"] == "0077"


def test_stopping_fits_draining() -> None:
    units = {file.stem: Unit(file)["Service"] for file in UNITS}
    drain_s = GatewayTable().drain_timeout / NS_PER_S
    assert int(units["prfaas-gateway"]["TimeoutStopSec"]) >= drain_s + 10
    assert int(units["prfaas-pool"]["TimeoutStopSec"]) >= DRAIN_NS / NS_PER_S + 10


def test_the_command_lines_of_units_and_page_are_understood(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "systemd.md").read_text()
    examples = re.findall(r"^POOL_ARGS=(.+)$", page, re.MULTILINE)
    assert len(examples) == 2
    units = {file.stem: Unit(file)["Service"] for file in UNITS}
    for example in examples:
        line = units["prfaas-pool"]["ExecStart"].replace("$POOL_ARGS", example)
        line = line.replace("/etc/prfaas/identity", str(tmp_path))
        program, command, *args = shlex.split(line)
        assert (program, command) == ("/opt/prfaas/bin/prfaas", "pool")
        read = pool.make_context("pool", args).params
        assert read["socket_path"] == Path("/run/prfaas/pool.sock")
        assert read["name"] in example
    (args_of_second,) = re.findall(r"GATEWAY_ARGS=([^`]+)`", page)
    line = units["prfaas-gateway"]["ExecStart"].replace("$GATEWAY_ARGS", args_of_second)
    read = gateway.make_context("gateway", shlex.split(line)[2:]).params
    assert (str(read["file"]), read["name"]) == ("/etc/prfaas/deployment.toml", "gateway-b")


@needs_logrotate
def test_a_log_that_is_held_open_is_rotated_and_goes_on(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    tmp_path.chmod(0o755)
    logs.chmod(0o700)
    rules = (ROOT / "deploy" / "logrotate" / "prfaas").read_text()
    rules = rules.replace("/var/lib/prfaas", str(tmp_path)).replace("    su prfaas prfaas\n", "")
    file = tmp_path / "rules"
    file.write_text(rules)
    file.chmod(0o644)
    command = [LOGROTATE or "", "--force", "--state", str(tmp_path / "status"), str(file)]
    with (logs / "pd-a.log").open("a") as log:
        for number in range(3):
            log.write(f"before {number}\n")
            log.flush()
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
        log.write("after\n")
    assert (logs / "pd-a.log").read_text() == "after\n"
    assert (logs / "pd-a.log.1").read_text() == "before 2\n"
    assert len(list(logs.glob("*.gz"))) == 2
