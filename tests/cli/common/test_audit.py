"""`prfaas audit`: exit codes, words, filters, sums."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from prfaas.audit.chain_file import ChainFile
from prfaas.audit.settings import AuditSettings
from prfaas.cli.common import reading_progress
from prfaas.cli.main import cli
from prfaas.core.audit.records import CheckpointCause
from prfaas.errors import ConfigError

AT_NS = 1_764_000_000 * 10**9
MOVED = {"kind": "movement", "direction": "sent", "from": "prfaas-pool", "to": "pd-pool"}


def make(folder: Path) -> None:
    """Logs of a pool node and a gateway, an hour of records a minute apart."""
    pool = ChainFile(AuditSettings(folder, folder), "prfaas-pool", lambda: AT_NS)
    for number in range(60):
        outcome = "link_lost" if number % 3 == 0 else "committed"
        sizes = {"bytes": 10, "link_bytes": 100, "wire_bytes": 70}
        record = {**MOVED, "tenant": f"{number % 2}abc", "outcome": outcome, **sizes}
        pool.append([(AT_NS + number * 60 * 10**9, record)])
    pool.checkpoint(CheckpointCause.END)
    pool.close()
    gateway = ChainFile(AuditSettings(folder, folder), "gateway", lambda: AT_NS)
    for name in ("alice", "bob"):
        gateway.append([(AT_NS, {"kind": "operator", "operator": name, "action": "drain"})])
    gateway.append([(AT_NS, {"kind": "refusal", "reason": "unauthorized", "route": "a\x1b[2Jb"})])
    gateway.checkpoint(CheckpointCause.END)
    gateway.close()


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["audit", *map(str, args)])


def queried(folder: Path, *args: str) -> list[dict[str, Any]]:
    result = run("query", folder, "--json", *args)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_intact_logs_exit_with_0_and_name_the_key_that_was_used(tmp_path: Path) -> None:
    make(tmp_path)
    result = run("verify", tmp_path)

    assert result.exit_code == 0
    assert "gateway: intact; 7 lines" in result.output
    assert "prfaas-pool: intact; 64 lines" in result.output
    assert "compare with a key kept elsewhere" in result.output


def test_damage_exits_with_1_and_names_file_and_line(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "gateway.000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"alice", b"malor"))
    result = run("verify", tmp_path)

    assert result.exit_code == 1
    assert "gateway: DAMAGED" in result.output
    assert "gateway.000001.jsonl, line 4: its hash is wrong" in result.output
    found = json.loads(run("verify", tmp_path, "--json").output)["logs"]
    assert {log: report["is_intact"] for log, report in found.items()} == {
        "gateway": False,
        "prfaas-pool": True,
    }


def test_a_key_and_a_number_of_lines_from_elsewhere_are_compared(tmp_path: Path) -> None:
    make(tmp_path / "logs")
    key = tmp_path / "kept.pub"
    (tmp_path / "logs" / "gateway.pub").rename(key)
    common = ("verify", tmp_path / "logs", "--name", "gateway", "--key")

    assert run(*common, key, "--expect-lines", 7).exit_code == 0
    assert run(*common, key.read_text().strip()).exit_code == 0
    assert run(*common, "ab" * 32).exit_code == 1
    late = run(*common, key, "--expect-lines", 9)
    assert late.exit_code == 1
    assert "2 were cut off at the end" in late.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("verify", "nowhere"), "cannot be read"),
        (("verify", "."), "there is no audit log"),
        (("verify", "logs", "--name", "pd-pool"), "there is no audit log of pd-pool"),
        (("verify", "logs", "--expect-lines", "3"), "need --name"),
        (("verify", "logs", "--name", "gateway", "--key", "abc"), "no public key"),
        (("query", "logs", "--since", "yesterday"), "is no time"),
    ],
)
def test_mistakes_of_the_operator_are_named(
    args: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "logs")
    monkeypatch.chdir(tmp_path)

    error = run(*args).exception

    assert isinstance(error, ConfigError)
    assert words in str(error)


def test_records_are_found_by_their_fields(tmp_path: Path) -> None:
    make(tmp_path)

    assert len(queried(tmp_path, "--kind", "movement")) == 60
    assert len(queried(tmp_path, "--outcome", "link_lost")) == 20
    assert len(queried(tmp_path, "--tenant", "1a", "--source", "prfaas-pool")) == 30
    assert [r["operator"] for r in queried(tmp_path, "--operator", "bob")] == ["bob"]
    assert len(queried(tmp_path, "--outcome", "unauthorized", "--name", "gateway")) == 1
    assert {r["kind"] for r in queried(tmp_path)} == {"movement", "operator", "refusal", "start"}


def test_times_are_in_utc_unless_they_have_an_offset(tmp_path: Path) -> None:
    make(tmp_path)
    window = ("--kind", "movement", "--since", "2025-11-24T16:10", "--until", "2025-11-24T16:20")
    shifted = ("--kind", "movement", "--since", "2025-11-24T17:10+01:00")

    assert len(queried(tmp_path, *window)) == 10
    assert len(queried(tmp_path, *shifted)) == 50


def test_sums_are_by_kind_and_outcome(tmp_path: Path) -> None:
    make(tmp_path)
    rows = json.loads(run("query", tmp_path, "--sums", "--json", "--kind", "movement").output)
    by_outcome = {row["outcome"]: row for row in rows["sums"]}

    assert by_outcome["committed"]["records"] == 40
    assert by_outcome["link_lost"]["wire_bytes"] == 20 * 70
    table = run("query", tmp_path, "--sums").output
    assert "4,000" in table
    assert "movement sent prfaas-pool pd-pool committed" in table


def test_a_record_for_people_has_no_control_characters(tmp_path: Path) -> None:
    make(tmp_path)
    output = run("query", tmp_path, "--kind", "refusal").output

    assert "\x1b" not in output
    assert "reason=unauthorized" in output


def test_a_terminal_shows_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(reading_progress, "Console", lambda **_: console)

    assert run("verify", tmp_path).exit_code == 0
    assert "reading" in screen.getvalue()
