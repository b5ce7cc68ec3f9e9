"""`prfaas trace`: what it writes, plans and simulations read; what it drops, it counts."""

from __future__ import annotations

import gzip
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from prfaas.cli.common import reading_progress
from prfaas.cli.main import cli
from prfaas.errors import ConfigError
from prfaas.planner.workload import read_trace
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.traces.reader import read_requests
from prfaas.traces.requests import RecordedRequest

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "traces" / "data"
EXAMPLES = ROOT / "examples" / "sim"
REQUESTS = (
    "mooncake_conversation_40.jsonl",
    "azure_conv_2023_40.csv",
    "azure_2024.csv",
    "burstgpt.csv",
    "burstgpt_3.csv",
    "servegen.csv",
)


def run(*args: object) -> str:
    result = CliRunner().invoke(cli, ["trace", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def show(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("show", path, "--json"))
    return found


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_an_import_keeps_every_request_for_plans_and_simulations(
    tmp_path: Path, name: str, suffix: str
) -> None:
    out = tmp_path / f"out{suffix}"
    run("import", DATA / name, "--out", out)
    rows = read_requests(DATA / name).rows
    assert read_requests(out).rows == rows
    assert read_trace(out) == read_trace(DATA / name)
    settings = ['workload.arrivals="trace"', f'workload.trace="{out}"']
    scenario = load_scenario(EXAMPLES / "azure.toml", settings)
    assert [
        RecordedRequest(r.arrived_at_ns, r.num_prompt_tokens, r.num_output_tokens, r.block_ids)
        for r in scenario.workload.with_rate_scaled(2).requests(1)
    ] == list(rows)


def test_a_simulation_reads_a_public_format_as_it_is() -> None:
    settings = ['workload.arrivals="trace"', f'workload.trace="{DATA / "burstgpt.csv"}"']
    requests = load_scenario(EXAMPLES / "azure.toml", settings).workload.requests(1)
    assert [r.num_prompt_tokens for r in requests] == [501, 920, 1280]


def test_what_is_dropped_is_counted_with_its_reason_and_first_line(tmp_path: Path) -> None:
    lines = (DATA / "burstgpt.csv").read_text().splitlines()
    lines += ["130,GPT-4,7,x,7,API log", "131,GPT-4,7,y,7,API log", "1,GPT-4,7,7,14,API log"]
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("\r\n".join(lines))
    with pytest.raises(ConfigError, match=r"2 of 7 lines are damaged, more than 1\.00%"):
        run("import", source, "--out", out)
    assert not out.exists()
    assert [*tmp_path.iterdir()] == [source]
    printed = run("import", source, "--out", out, "--damaged-max", "30%")
    assert f"{out}: 4 requests" in printed
    assert "burstgpt, 7 lines, 3 dropped" in printed
    assert "2 damaged: Response tokens is no whole number" in printed
    assert "line 6: Response tokens is 'x'; expected a whole number" in printed
    assert "1 left out: failed requests, without output" in printed
    assert "1 requests that were not in order, and were sorted" in printed
    found = json.loads(
        run("import", source, "--out", out, "--damaged-max", "0.3", "--json", "--force")
    )
    assert found["num_requests"] == 4
    assert found["drops"]["reasons"]["Response tokens is no whole number"] == {
        "damaged": True,
        "first_line": 6,
        "first_detail": "Response tokens is 'x'; expected a whole number",
        "count": 2,
    }


def test_a_part_of_a_trace_starts_and_ends_where_it_was_asked_to(tmp_path: Path) -> None:
    source, out = EXAMPLES / "traces" / "azure_code_2023.csv.gz", tmp_path / "out.jsonl"
    whole = read_requests(source).rows
    run("import", source, "--out", out, "--start", "10min", "--duration", "5min")
    part = [row for row in whole if 600e9 <= row.at_ns < 900e9]
    assert read_requests(out).rows == tuple(r._replace(at_ns=r.at_ns - part[0].at_ns) for r in part)
    run("import", source, "--out", out, "--requests", "7", "--force")
    assert read_requests(out).rows == whole[:7]


def test_chats_become_sessions_that_a_simulation_plays(tmp_path: Path) -> None:
    source, out = tmp_path / "chats.jsonl.gz", tmp_path / "sessions.jsonl.gz"
    system = {"role": "system", "content": "s" * 4000}
    chat = [
        {"role": role, "content": f"{i}" * 800}
        for i, role in enumerate(("user", "assistant", "user", "assistant"))
    ]
    line = json.dumps({"messages": [system, *chat]})
    source.write_bytes(gzip.compress(f"{line}\n{line}\n".encode()))
    printed = run("import", source, "--out", out, "--chars-per-token", 4, "--pause", "30s")
    assert "4 requests in 2 sessions" in printed
    assert "lengths: 4 characters a token" in printed
    assert "2 pauses before a turn that are not recorded" in printed
    found = show(out)
    assert (found["num_requests"], found["sessions"]["num_sessions"]) == (4, 2)
    assert found["sessions"]["pause_s"]["mean"] == 30
    assert found["prefix_hit_ratio"] > 0.6
    settings = [
        'workload.arrivals="sessions"',
        f'workload.trace="{out}"',
        "workload.users=3",
        "workload.duration=600s",
    ]
    path = tmp_path / "scenario.toml"
    plan = ROOT / "examples" / "plan" / "paper-case-study.toml"
    path.write_text(f'title = "chats"\nplan = "{plan}"\n[workload]\n[slo]\nttft = "10s"\n')
    roots = load_scenario(path, settings).workload.requests(1)
    assert len(roots) == 3
    assert roots[0].followers[0].after_ns == 30e9


def test_the_chats_of_the_example_become_three_sessions(tmp_path: Path) -> None:
    out = tmp_path / "sessions.jsonl"
    done = json.loads(run("import", DATA / "chats.jsonl", "--out", out, "--json"))
    assert (done["num_requests"], done["num_sessions"], done["form"]) == (5, 3, "chats")
    assert done["notes"]["prompts without an answer"] == 1
    found = show(out)
    assert found["load"]["rate_per_s"] == pytest.approx(4 / 100)
    assert found["sessions"]["pause_s"]["max"] == 36.5


def test_a_bar_follows_the_bytes_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(reading_progress, "Console", lambda **_: console)
    source = EXAMPLES / "traces" / "azure_code_2023.csv.gz"
    run("import", source, "--out", tmp_path / "out.jsonl")
    assert "reading azure_code_2023.csv.gz" in screen.getvalue()
    size = source.stat().st_size / 1024
    assert f"{size:.1f}/{size:.1f} KiB" in screen.getvalue()


def test_the_figures_of_public_traces_are_those_that_are_known() -> None:
    found = show(EXAMPLES / "traces" / "mooncake_conversation.jsonl.gz")
    assert found["num_requests"] == found["num_with_ids"] == 12_031
    assert found["prefix_hit_ratio"] == pytest.approx(0.374, abs=0.001)
    assert found["load"]["tick_s"] == pytest.approx(3, abs=0.01)
    assert found["prompt_tokens"]["p90"] == pytest.approx(27_367, rel=0.001)
    found = show(EXAMPLES / "traces" / "azure_conversation_2023.csv.gz")
    assert found["load"]["rate_per_s"] == pytest.approx(5.53, abs=0.01)
    assert found["load"]["gap_cv"] == pytest.approx(1.09, abs=0.01)
    assert (found["load"]["tick_s"], found["num_with_ids"]) == (None, 0)
    printed = run("show", EXAMPLES / "traces" / "mooncake_conversation.jsonl.gz")
    assert "37.4% of the prompt tokens" in printed
    assert 'workload.jitter = "3s"' in printed


def test_show_reads_every_format_and_a_single_request(tmp_path: Path) -> None:
    for name in REQUESTS:
        assert show(DATA / name)["num_requests"] == len(read_requests(DATA / name).rows)
    path = tmp_path / "lengths.csv"
    path.write_text("tokens\n5\n")
    assert show(path)["load"]["span_s"] == 0
    assert "all requests arrive at the same time, or times are not recorded" in run("show", path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", ".", "--chars-per-token", "3"], "not both"),
        (["--damaged-max", "100%"], "not a share from 0% to less than 100%"),
        (["--damaged-max", "some"], "not a share"),
        (["--start", "soon"], "is not a duration"),
        (["--from", "csv"], "'csv' is not one of 'mooncake', 'azure'"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: list[str], message: str) -> None:
    args = ["trace", "import", str(DATA / "burstgpt.csv"), "--out", str(tmp_path / "o.jsonl")]
    result = CliRunner().invoke(cli, [*args, *options])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("burstgpt.csv", ["--chars-per-token", "3"], "are for chats"),
        ("burstgpt.csv", ["--from", "azure"], "columns Timestamp, Model"),
        ("missing.csv", [], "cannot be read: No such file"),
        ("../../../README.md", [], "expected JSON lines with input_length"),
    ],
)
def test_what_can_not_be_imported_is_one_clear_error(
    tmp_path: Path, source: str, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("import", DATA / source, "--out", tmp_path / "o.jsonl", *options)
    assert not [*tmp_path.iterdir()]


def test_no_file_is_overwritten_unasked(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text((DATA / "mooncake_conversation_40.jsonl").read_text())
    before = source.read_bytes()
    for options in ([], ["--force"]):
        with pytest.raises(ConfigError, match="exists; give another name"):
            run("import", source, "--out", source, *options)
    with pytest.raises(ConfigError, match=r"has to end in \.jsonl or \.jsonl\.gz"):
        run("import", source, "--out", tmp_path / "out.csv")
    assert source.read_bytes() == before


def test_terminal_codes_of_a_file_are_not_printed(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("\x1b[2Ja,b\n1,2\n")
    with pytest.raises(ConfigError) as raised:
        run("show", source)
    assert "\x1b" not in str(raised.value)
