"""The tier in a bucket: its table, its options, and what `prfaas check` says of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.cli.parts import pool_command
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.pool.shared.settings import S3Settings
from prfaas.wire.identity import make_authority, make_identity
from tests.s3.fixtures import Bucket, new_key

from .check_files import POOL, SITE
from .conftest import Prfaas, edit, one_line

TABLE = """
[clusters.pd.s3]
bucket = "kv-blocks"
keys = "site.keys"
limit = "200GiB"
"""


def with_table(laptop: Path, table: str) -> None:
    laptop.write_text(laptop.read_text() + table)


@pytest.fixture
def keys(laptop: Path) -> Path:
    file = laptop.parent / "site.keys"
    file.write_text(new_key())
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('endpoint = "http://10.0.0.1:9000"', "plain HTTP to another machine"),
        ('endpoint = "http://storage"', "plain HTTP to another machine"),
        ('endpoint = "storage:9000"', "s3.endpoint: has to be http:// or https://"),
        ('object_size = "1MiB"', "the limits are 4MiB and 64MiB"),
        ('deadline = "90s"', "the most is 60 s"),
        ('deadline = "1ns"', "the least is 1ms"),
        ('prefix = "../x"', "s3.prefix: has to be parts of letters"),
        ('region = "eu central"', "s3.region: has to be a region"),
        ('secret = "x"', "s3.secret: unknown key"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_with_the_key(
    prfaas: Prfaas, laptop: Path, line: str, words: str
) -> None:
    with_table(laptop, TABLE + line)
    code, _, errors = prfaas("check", laptop)
    assert code == 2
    assert "clusters.pd.s3" in errors
    assert words in errors


def test_a_limit_below_two_objects_and_a_bucket_without_a_name_are_refused(
    prfaas: Prfaas, laptop: Path
) -> None:
    with_table(laptop, TABLE.replace("200GiB", "20MiB"))
    assert "fewer than two objects" in prfaas("check", laptop)[2]
    edit(laptop, '"20MiB"', '"20GiB"')
    edit(laptop, "kv-blocks", "KV_blocks")
    assert "the name of a bucket" in prfaas("check", laptop)[2]


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"])
def test_check_reports_a_bucket_that_cannot_be_reached_and_missing_keys(
    prfaas: Prfaas, laptop: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with_table(laptop, TABLE + f'endpoint = "{endpoint}"\nregion = "us-east-1"')
    code, output, _ = prfaas("check", laptop)
    said = " ".join(output.split())
    assert code == 1
    assert "clusters.pd.s3: bucket kv-blocks cannot be listed from here" in said
    assert "clusters.pd.s3.keys: the keys of the shared tier, site.keys, cannot be read" in said
    assert "openssl rand -base64 32" in said


async def test_check_is_silent_of_a_bucket_that_answers(bucket: Bucket, laptop: Path) -> None:
    settings = bucket.settings
    with_table(
        laptop,
        TABLE.replace("kv-blocks", settings.bucket).replace("site.keys", str(settings.keys))
        + f'endpoint = "{settings.endpoint}"\nregion = "us-east-1"',
    )
    result = await asyncio.to_thread(CliRunner().invoke, cli, ["check", str(laptop)])
    assert result.exit_code == 0, result.output
    assert "s3" not in result.output


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identities: Path
) -> list[PoolProcessSettings]:
    """The settings of the pool nodes that would run."""
    found: list[PoolProcessSettings] = []
    monkeypatch.setattr(pool_command, "_run", lambda settings, _: found.append(settings))
    monkeypatch.chdir(tmp_path)
    make_authority(tmp_path / "identities")
    make_identity(tmp_path / "identities", POOL)
    (tmp_path / "site.toml").write_text(SITE + TABLE)
    return found


def test_options_override_the_table(started: list[PoolProcessSettings]) -> None:
    base = f"pool site.toml --name {POOL}"
    for more in ("", " --s3-limit 1GiB --s3-deadline 300ms --s3-prefix kv/pd"):
        CliRunner().invoke(cli, (base + more).split(), catch_exceptions=False)
    first, second = (settings.shared for settings in started)
    assert first == S3Settings("kv-blocks", Path("site.keys"), 200 << 30, "pd")
    assert second == S3Settings(
        "kv-blocks", Path("site.keys"), 1 << 30, "kv/pd", deadline_ns=300_000_000
    )


def test_options_alone_are_enough(started: list[PoolProcessSettings]) -> None:
    options = f"pool --name {POOL} --listen 127.0.0.1:0 --identities identities --socket s"
    options += " --s3-bucket kv-blocks --s3-keys k --s3-limit 1GiB --s3-object-size 4MiB"
    options += " --s3-endpoint https://s3.example.net --s3-region eu-1"
    CliRunner().invoke(cli, options.split(), catch_exceptions=False)
    (settings,) = started
    assert settings.shared == S3Settings(
        "kv-blocks",
        Path("k"),
        1 << 30,
        "prfaas",
        "https://s3.example.net",
        "eu-1",
        pack_bytes=4 << 20,
    )


def test_incomplete_options_are_refused(prfaas: Prfaas, started: list[PoolProcessSettings]) -> None:
    options = f"--name {POOL} --listen 127.0.0.1:0 --identities identities --socket s"
    code, _, errors = prfaas("pool", *options.split(), "--s3-bucket", "kv-blocks")
    assert code == 2
    assert "keys: is required" in errors
    assert "limit: is required" in errors
    assert not started


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    prfaas: Prfaas, laptop: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with_table(laptop, TABLE)
    assert "pip install 'prfaas[s3]'" in " ".join(prfaas("check", laptop)[1].split())


def test_a_pool_node_without_keys_does_not_start(
    prfaas: Prfaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_authority(tmp_path / "identities")
    make_identity(tmp_path / "identities", POOL)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    options = f"--name {POOL} --listen 127.0.0.1:0 --identities identities --socket s --memory 8MiB"
    options += " --s3-bucket kv-blocks --s3-keys nokeys --s3-limit 1GiB"
    line = one_line(prfaas("pool", *options.split()))
    assert "the keys of the shared tier, nokeys, cannot be read" in line
