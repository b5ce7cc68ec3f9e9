"""The tier in a Mooncake Store: its table, and what `prfaas check` says of it."""

from __future__ import annotations

import importlib.util
import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.cli.parts import pool_command
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.wire.identity import make_authority, make_identity
from tests.mooncake.store import missing, running_store
from tests.s3.fixtures import new_key

from .check_files import POOL, SITE
from .conftest import Prfaas

TABLE = """
[clusters.pd.mooncake]
master = "127.0.0.1:1"
keys = "site.keys"
"""


def with_table(laptop: Path, table: str) -> None:
    laptop.write_text(laptop.read_text() + table)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('deadline = "90s"', "the limits are 1ms and 60s"),
        ('deadline = "1ns"', "the limits are 1ms and 60s"),
        ('buffer = "1MiB"', "the limits are 16MiB and 16GiB"),
        ("replicas = 0", "mooncake.replicas"),
        ("replicas = 9", "mooncake.replicas"),
        ('protocol = "quic"', "mooncake.protocol"),
        ('metadata = "ftp://host"', 'mooncake.metadata: has to be "P2PHANDSHAKE"'),
        ('devices = "a b"', "mooncake.devices: has to be names of devices"),
        ('prefix = "../x"', "mooncake.prefix: has to be parts of letters"),
        ('segment = "1GiB"', "mooncake.segment: unknown key"),
        ('[clusters.pd.s3]\nbucket = "kv-blocks"\nkeys = "k"\nlimit = "1GiB"', "one shared tier"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_with_the_key(
    prfaas: Prfaas, laptop: Path, line: str, words: str
) -> None:
    with_table(laptop, TABLE + line)
    code, _, errors = prfaas("check", laptop)
    assert code == 2
    assert "clusters.pd" in errors
    assert words in errors


def test_check_reports_a_master_that_cannot_be_reached_and_missing_keys(
    prfaas: Prfaas, laptop: Path
) -> None:
    with_table(laptop, TABLE)
    code, output, _ = prfaas("check", laptop)
    said = " ".join(output.split())
    assert code == 1
    assert "clusters.pd.mooncake: master 127.0.0.1:1 cannot be reached from here" in said
    assert "clusters.pd.mooncake.keys: the keys of the shared tier, site.keys" in said


def test_check_is_silent_of_a_store_that_can_be_used(
    prfaas: Prfaas, laptop: Path, tmp_path: Path
) -> None:
    if missing():
        pytest.skip(missing())
    keys = tmp_path / "site.keys"
    keys.write_text(new_key())
    keys.chmod(0o600)
    with running_store(0) as store:
        table = TABLE.replace("127.0.0.1:1", f"127.0.0.1:{store.port}")
        with_table(laptop, table.replace("site.keys", str(keys)))
        code, output, _ = prfaas("check", laptop)
    assert code == 0
    assert "mooncake" not in output


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def absent(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "mooncake" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with_table(laptop, TABLE)
    assert "pip install 'prfaas[mooncake]'" in " ".join(prfaas("check", laptop)[1].split())


def test_a_library_that_cannot_be_loaded_is_named_with_what_it_needs(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ImportError: libibverbs.so.1: cannot open shared object file"

    def fails(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", text)

    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: ModuleSpec("mooncake", None))
    monkeypatch.setattr(subprocess, "run", fails)
    with_table(laptop, TABLE)
    said = " ".join(prfaas("check", laptop)[1].split())
    assert f"cannot be loaded: {text}; on Debian it needs: apt-get install libibverbs1" in said


def test_a_pool_node_takes_the_settings_of_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[PoolProcessSettings] = []
    monkeypatch.setattr(pool_command, "_run", lambda settings, _: found.append(settings))
    monkeypatch.chdir(tmp_path)
    make_authority(tmp_path / "identities")
    make_identity(tmp_path / "identities", POOL)
    more = 'deadline = "300ms"\nbuffer = "64MiB"\nreplicas = 2\nprefix = "kv/pd"\n'
    Path("site.toml").write_text(SITE + TABLE + more)
    options = ["pool", "site.toml", "--name", POOL]
    CliRunner().invoke(cli, options, catch_exceptions=False)
    (settings,) = found
    assert settings.shared == MooncakeSettings(
        ("127.0.0.1", 1),
        Path("site.keys"),
        "kv/pd",
        replicas=2,
        deadline_ns=300_000_000,
        buffer_bytes=64 << 20,
    )
    result = CliRunner().invoke(cli, [*options, "--s3-bucket", "kv-blocks"])
    assert "a cluster has one shared tier" in str(result.exception)
