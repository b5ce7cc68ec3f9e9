"""`prfaas check` in a pod of Kubernetes, and of files as the kubelet mounts them."""

import base64
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.cli.deploy.deployment_checks import open_secrets
from prfaas.cli.deploy.deployment_warnings import pod_traps
from prfaas.config.load import load_deployment
from prfaas.wire.identity import identity_in, make_authority, make_identity
from tests.cli.conftest import Prfaas, edit, one_line

POD_USER, POD_GROUP = 10001, 10001
POD = """
state = "state"
[model]
name = "m"
path = "/models/m"
[gateway]
listen = "0.0.0.0:8000"
[routing]
offload_threshold = 0
[security]
identities = "identities"
[membership.kubernetes]
service_account = "api"
[clusters.pd]
role = "pd"
[clusters.pd.pools.pd-a]
memory = "16MiB"
listen = "0.0.0.0:7100"
admin = "0.0.0.0:7180"
socket = "run/pool.sock"
disk = "blocks"
disk_limit = "16MiB"
disk_keys = "site.keys"
[clusters.prefill]
role = "prfaas"
"""
"""The file of a pool node, as the chart writes it."""


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all that a pool node needs, in what looks like a pod."""
    with tempfile.TemporaryDirectory(prefix="prfaas") as name:
        folder = Path(name)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        (folder / "pool.toml").write_text(POD)
        make_authority(folder / "identities")
        make_identity(folder / "identities", "pd-a")
        (folder / "site.keys").write_text(base64.b64encode(os.urandom(32)).decode())
        (folder / "site.keys").chmod(0o400)
        (folder / "run").mkdir(mode=0o700)
        (folder / "api").mkdir()
        for file in ("token", "ca.crt", "namespace"):
            (folder / "api" / file).write_text("x")
        yield folder


def findings(prfaas: Prfaas) -> list[str]:
    """Lines about a pool node, without those that say that it is fine."""
    code, output, errors = prfaas("check", "pool.toml", "--pool", "pd-a")
    assert errors == ""
    text = " ".join(output.split())
    text, _, last = text.rpartition("pool.toml: ")
    assert (code == 0) == (last == "ok for pd-a") == ("failure: " not in text)
    lines = text.replace("failure: ", "\n").replace("warning: ", "\n").split("\n")
    return [line.strip() for line in lines if line.strip()]


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("warning: ")]


def test_a_pod_that_nobody_reaches_is_told(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not warnings(prfaas("check", laptop)[1])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.7:8000")
    lines = warnings(prfaas("check", laptop)[1])
    assert [line.split()[1] for line in lines] == [
        "gateway.listen",
        "/health",
        "/health",
        "VLLM_PORT",
    ]
    assert 'listen on "0.0.0.0:' in lines[0]
    assert "metrics of prfaas-pool are on loopback" in lines[1]
    assert "enableServiceLinks: false" in lines[3]


@pytest.mark.parametrize("command", ["check", "up"])
def test_a_socket_with_too_long_a_path_is_named(prfaas: Prfaas, laptop: Path, command: str) -> None:
    edit(laptop, 'state = "', f'state = "{"s" * 100}/')
    line = one_line(prfaas(command, laptop))
    assert "the socket of prfaas-pool would be" in line
    assert "a socket's path has 107 at most" in line


def test_a_key_that_another_user_owns_is_named_with_both_users(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = load_deployment(laptop)
    directory = deployment.security.identities
    make_authority(directory)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(directory, name)
    key, may = identity_in(directory, "gateway").key, os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != key and may(path, mode))
    output = " ".join(prfaas("check", laptop)[1].split())
    assert f"gateway.key cannot be read: it is of user {key.stat().st_uid}" in output
    assert f"and this is user {os.getuid()}; give it to that user (in Kubernetes: fsGroup" in output


@pytest.mark.parametrize(
    ("mode", "user", "groups", "is_told"),
    [
        (0o440, POD_USER, [POD_GROUP], False),
        (0o444, POD_USER, [POD_GROUP], True),
        (0o460, POD_USER, [POD_GROUP], True),
        (0o440, POD_USER, [], True),
        (0o440, 0, [POD_GROUP], True),
    ],
)
def test_secrets_as_the_kubelet_mounts_them_are_no_open_secrets(
    laptop: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    user: int,
    groups: list[int],
    is_told: bool,
) -> None:
    deployment = load_deployment(laptop)
    directory = deployment.security.identities
    make_authority(directory)
    key, look = make_identity(directory, "gateway").key, Path.stat

    def mounted(path: Path, **options: bool) -> os.stat_result:
        found = look(path, **options)
        if path != key:
            return found
        return os.stat_result((0o100000 | mode, 1, 1, 1, 0, POD_GROUP, found.st_size, 0, 0, 0))

    monkeypatch.setattr(Path, "stat", mounted)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(os, "getgroups", lambda: groups)
    assert any("gateway.key" in line for line in open_secrets(deployment)) == is_told


def test_a_pool_node_alone_needs_nothing_of_the_other_parts(prfaas: Prfaas, pod: Path) -> None:
    """No model, no identity of the gateway, no API server: its pod has none of them."""
    assert findings(prfaas) == []


def test_a_pool_node_that_is_not_in_the_file_is_named(prfaas: Prfaas, pod: Path) -> None:
    line = one_line(prfaas("check", "pool.toml", "--pool", "pd-b"))
    assert "--pool pd-b is no pool node of the file, which has pd-a" in line


def test_a_socket_in_a_folder_of_the_node_that_is_roots_is_named(
    prfaas: Prfaas, pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostPath without the init container of the chart."""
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "run" and may(path, mode)
    )
    (line,) = findings(prfaas)
    assert f"run, the folder of the socket, belongs to user {os.getuid()}" in line
    assert "an init container hands it over" in line


def test_a_socket_of_another_user_is_named(
    prfaas: Prfaas, pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("run/pool.sock")
        assert findings(prfaas) == []
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + POD_USER)
        lines = [line for line in findings(prfaas) if "socket" in line]
    (line,) = lines
    assert f"pool.sock belongs to user {owner}, and this is user {owner + POD_USER}" in line
    assert "runAsUser" in line


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('socket = "run/', 'socket = "nowhere/', "nowhere, the folder of the socket, is missing"),
        ('admin = "0.0.0.0:7180"', "", "/health and /metrics of pd-a are on loopback"),
        ('admin = "0.0.0.0', 'admin = "127.0.0.1', "/health and /metrics of pd-a are on loopback"),
        (
            'listen = "0.0.0.0:7100"',
            'listen = "127.0.0.1:7100"',
            "listen of pd-a is 127.0.0.1:7100",
        ),
        ('disk_keys = "site', 'disk_keys = "other', "other.keys, cannot be read: No such file"),
        ('identities = "ident', 'identities = "no', "noities/ca.pem is missing"),
        ('account = "api"', 'account = "home"', "needs token, ca.crt, namespace in"),
    ],
)
def test_what_does_not_work_in_a_pod_is_named(
    prfaas: Prfaas, pod: Path, old: str, new: str, words: str
) -> None:
    edit(pod / "pool.toml", old, new)
    (line,) = findings(prfaas)
    assert words in line


def test_a_token_that_the_pods_user_cannot_read_is_named(
    prfaas: Prfaas, pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "token" and may(path, mode)
    )
    (line,) = findings(prfaas)
    assert "needs token in" in line
    assert "fsGroup" in line


def test_replicas_without_the_secret_of_the_salt_are_told(pod: Path) -> None:
    deployment = load_deployment(pod / "pool.toml")
    (line,) = pod_traps(deployment)
    assert "tenant.salt is missing: this pod makes its own" in line
    (pod / "state").mkdir()
    (pod / "state" / "tenant.salt").write_text("x")
    assert not list(pod_traps(deployment))


def test_a_port_of_a_pod_may_be_taken_by_its_own_process(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectl exec` runs the check beside the gateway."""
    place = load_deployment(laptop).gateway.listen
    with socket.create_server(("127.0.0.1", int(place.rpartition(":")[2]))):
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        assert "cannot listen on" in prfaas("check", laptop)[1]
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        assert "cannot listen on" not in prfaas("check", laptop)[1]
