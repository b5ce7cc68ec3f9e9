"""Settings of `prfaas pool`, from a deployment file and from options."""

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.cli.parts import pool_command
from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.wire.identity import make_authority, make_identity
from tests.cli.check_files import POOL, SITE


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PoolProcessSettings]:
    """The settings of the pool nodes that would run."""
    found: list[PoolProcessSettings] = []
    monkeypatch.setattr(pool_command, "_run", lambda settings, _: found.append(settings))
    return found


def test_defaults_are_those_of_the_deployment_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[PoolProcessSettings]
) -> None:
    monkeypatch.chdir(tmp_path)
    identities = tmp_path / "identities"
    make_authority(identities)
    for name in (POOL, "prfaas-pool", "gateway"):
        make_identity(identities, name)
    (tmp_path / "site.toml").write_text(SITE)
    options = f"--name {POOL} --listen 0.0.0.0:7100 --identities {identities} --source prfaas-pool"
    options += " --gateway gateway --socket pool.sock"
    for arguments in (f"pool site.toml --name {POOL}", f"pool {options}"):
        CliRunner().invoke(cli, arguments.split(), catch_exceptions=False)

    from_file, from_options = started
    names = [field.name for field in dataclasses.fields(PoolProcessSettings)]
    fields = {name: getattr(from_file, name) for name in names}
    assert fields.pop("identity") is not None
    assert fields == {name: getattr(from_options, name) for name in fields}
    defaults = {field.name: field.default for field in dataclasses.fields(PoolProcessSettings)}
    assert defaults["link_encryption"] is from_file.link_encryption is LinkEncryption.SEALED
    assert defaults["link_codec"] is from_file.link_codec is LinkCodec.AUTO


def test_a_pool_node_knows_the_budget_and_the_pool_nodes_of_its_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[PoolProcessSettings]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_authority(tmp_path / "identities")
    make_identity(tmp_path / "identities", POOL)
    (tmp_path / "site.toml").write_text(
        SITE.replace("[clusters.pd]\n", '[clusters.pd]\nlink_budget = "2Gbps"\n')
    )
    CliRunner().invoke(cli, ["pool", "site.toml", "--name", POOL], catch_exceptions=False)

    (settings,) = started
    assert (settings.site_budget, settings.site) == (2 * 10**9, frozenset({POOL}))
