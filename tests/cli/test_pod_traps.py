"""`prfaas check` in a pod of Kubernetes, and of files as the kubelet mounts them."""

import os
from pathlib import Path

import pytest

from prfaas.cli.deploy.deployment_checks import open_secrets
from prfaas.config.load import load_deployment
from prfaas.wire.identity import identity_in, make_authority, make_identity

from .conftest import Prfaas, edit, one_line

POD_USER, POD_GROUP = 10001, 10001


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
