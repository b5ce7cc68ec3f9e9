"""The events of runs: `prfaas simulate --events`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.sim.report.events import FIELDS

EXAMPLES = Path(__file__).parents[3] / "examples" / "sim"
LINE_BYTES = 48


def test_a_line_a_fault_and_a_request(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    words = ["simulate", str(EXAMPLES / "link-cut.toml"), "--events", str(file)]
    words += ["--policy", "paper", "--policy", "adaptive", "--set", "workload.duration=12min"]
    words += ["--set", "routing.admission=false"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert f"wrote {file}" in done.output.replace("\n", "")
    lines = file.read_text().splitlines()
    head, *rest = map(json.loads, lines)
    assert head["request"] == list(FIELDS)
    starts = [i for i, line in enumerate(rest) if isinstance(line, dict)]
    assert [rest[i]["run"] for i in starts] == ["paper", "adaptive"]
    runs = [rest[starts[0] : starts[1]], rest[starts[1] :]]
    for system, fault, *requests in runs:
        assert system["slots"] == 100
        assert fault == ["link", 600_000, 60_000, 0, 0.0]
        assert {row[3] for row in requests} >= {"L", "R", "F"}
        for row in requests:
            assert row[1] > 0
            assert all(part >= 0 for part in row[4:])
        lengths = [(row[0], row[1]) for row in requests]
        assert lengths == [(row[0], row[1]) for row in runs[0][2:]], "the same in every run"
        fell = [row for row in requests if row[3] == "F"]
        assert any(row[4] > 0 for row in fell)
    assert file.stat().st_size / len(lines) < LINE_BYTES


def test_a_request_without_an_end_has_its_outcome(tmp_path: Path) -> None:
    file = tmp_path / "late.jsonl"
    words = ["simulate", str(EXAMPLES / "paper-poisson.toml"), "--events", str(file)]
    words += ["--set", "workload.rate=6", "--set", "workload.duration=60s"]
    words += ["--set", "workload.warmup=0s", "--set", "slo.ttft=2s"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in file.read_text().splitlines()[2:]]
    refused = [row for row in rows if row[3].endswith("rejected")]
    assert refused
    assert all(row[4:] == [None] * 6 for row in refused)


def test_many_runs_have_no_events(tmp_path: Path) -> None:
    words = ["simulate", str(EXAMPLES / "paper-poisson.toml"), "--events", str(tmp_path / "x")]
    assert "--sweep makes many runs" in CliRunner().invoke(cli, [*words, "--sweep"]).output
