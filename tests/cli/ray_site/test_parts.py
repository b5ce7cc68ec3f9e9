"""Parts started one by one, and identities: one clear line for every mistake."""

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.wire.identity import identity_in, make_authority, make_identity
from tests.cli.conftest import Prfaas, one_line


def pool_args(directory: Path, listen: str, socket_path: Path) -> tuple[object, ...]:
    return (
        *("pool", "--name", "pd-pool", "--listen", listen, "--admin", "127.0.0.1:0"),
        *("--socket", socket_path, "--identities", directory),
    )


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    directory = tmp_path / "identities"
    make_authority(directory)
    make_identity(directory, "pd-pool")
    return directory


def test_a_pool_whose_port_is_taken_says_so(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        line = one_line(prfaas(*pool_args(identities, listen, tmp_path / "pool.sock")))
    assert f"cannot listen on {listen}" in line
    assert not (tmp_path / "pool.sock").exists()


def test_a_pool_leaves_the_socket_of_a_running_one_alone(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    path = tmp_path / "pool.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        line = one_line(prfaas(*pool_args(identities, "127.0.0.1:0", path)))
        assert f"{path}: another process serves there" in line
        assert path.is_socket()


def test_a_pool_removes_no_file_where_its_socket_should_be(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    line = one_line(prfaas(*pool_args(identities, "127.0.0.1:0", path)))
    assert "no socket is there" in line
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--peer", "far-pool", "'far-pool' is not NAME=HOST:PORT"),
        ("--peer", "far-pool=10.0.0.1:70000", "65535"),
        ("--peer", "far-pool=10.0.0.1:8²", "65535"),
        ("--peer", "far-pool=pd..example.net:7100", "1 to 63 characters"),
        ("--link-budget", "far-pool=0Gbps", "1Mbps or more"),
        ("--link-budget", "=1Gbps", "NAME=RATE"),
    ],
)
def test_a_wrong_peer_or_budget_of_a_pool_is_said(
    prfaas: Prfaas, tmp_path: Path, identities: Path, option: str, value: str, said: str
) -> None:
    args = pool_args(identities, "127.0.0.1:0", tmp_path / "pool.sock")
    code, _, errors = prfaas(*args, option, value)
    assert code == 2
    assert said in errors


def test_an_identity_that_is_there_is_kept_and_said_to_be(prfaas: Prfaas, tmp_path: Path) -> None:
    args = ("identity", "gateway", "--directory", tmp_path / "identities")
    assert prfaas(*args)[2] == ""
    first = identity_in(tmp_path / "identities", "gateway").certificate.read_bytes()
    code, _, errors = prfaas(*args, "--address", "gw.example.net")
    assert code == 0
    assert "gateway has an identity, which is not changed" in errors
    assert identity_in(tmp_path / "identities", "gateway").certificate.read_bytes() == first


def test_a_pool_whose_socket_can_not_be_made_says_so(
    prfaas: Prfaas, tmp_path: Path, identities: Path
) -> None:
    for path in (tmp_path / "no" / "pool.sock", tmp_path / ("x" * 120)):
        line = one_line(prfaas(*pool_args(identities, "127.0.0.1:0", path)))
        assert str(path) in line


@pytest.mark.parametrize("memory", ["5", "many", "1 gb"])
def test_a_pool_needs_memory_with_a_unit(
    prfaas: Prfaas, tmp_path: Path, identities: Path, memory: str
) -> None:
    args = pool_args(identities, "127.0.0.1:0", tmp_path / "pool.sock")
    assert "is not a size" in one_line(prfaas(*args, "--memory", memory))


def test_a_pool_without_its_identity_says_how_to_make_one(prfaas: Prfaas, tmp_path: Path) -> None:
    line = one_line(prfaas(*pool_args(tmp_path, "127.0.0.1:0", tmp_path / "pool.sock")))
    assert "pd-pool.pem" in line
    assert "`prfaas identity`" in line


def test_a_gateway_that_is_not_told_where_an_engine_is_says_which_option(
    prfaas: Prfaas, laptop: Path
) -> None:
    assert "--engine prfaas-engine=URL" in one_line(prfaas("gateway", laptop))


def test_identities_are_made_once_with_keys_for_the_owner(prfaas: Prfaas, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "identities"
    assert prfaas("identity", "gateway", "pd-pool", "--directory", directory)[0] == 0
    names = {"ca.pem", "ca.key", "gateway.pem", "gateway.key", "pd-pool.pem", "pd-pool.key"}
    assert {path.name for path in directory.iterdir()} == names
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    code, output, _ = prfaas("identity", "pd-pool", "--directory", directory)
    assert code == 0
    assert output.splitlines() == [str(directory / "pd-pool.pem"), str(directory / "pd-pool.key")]
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    identity_in(directory, "gateway").server_context()


@pytest.mark.parametrize("name", ["../escaped", "a/b", "ca", "Upper", "zürich", "x" * 70])
def test_a_name_that_no_part_can_have_gets_no_identity(
    prfaas: Prfaas, tmp_path: Path, name: str
) -> None:
    directory = tmp_path / "identities"
    assert repr(name) in one_line(prfaas("identity", name, "--directory", directory))
    assert not directory.exists()


@pytest.mark.parametrize("address", ["zürich.example", ""])
def test_an_address_that_fits_no_certificate_is_one_line(
    prfaas: Prfaas, tmp_path: Path, address: str
) -> None:
    args = ("identity", "engine", "--directory", tmp_path, "--address", address)
    assert repr(address) in one_line(prfaas(*args))


def test_a_place_that_can_not_be_written_is_one_line(prfaas: Prfaas, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in one_line(prfaas("identity", "engine", "--directory", tmp_path / "file"))


WITHOUT_TORCH = """
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
from prfaas.cli.parts.without_torch import keep_torch_out
keep_torch_out()
import transformers
"""


def test_a_gateway_whose_environment_has_no_torch_logs_nothing_but_its_own_lines() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
