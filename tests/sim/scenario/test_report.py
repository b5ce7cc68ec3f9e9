"""The HTML report: complete, self-contained, escaped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import cli
from prfaas.errors import ConfigError
from prfaas.presentation import recorded_page
from prfaas.sim.report.run_figures import figures_of, print_report
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES

CUT = str(EXAMPLES / "link-cut.toml")
SHORT = ["workload.duration=4min", "workload.warmup=0s"]
EARLY = 'failure=[{kind="link", at="60s", duration="30s"}]'


def call(*arguments: str) -> Result:
    settings = [word for setting in (*SHORT, EARLY) for word in ("--set", setting)]
    return CliRunner().invoke(cli, ["simulate", CUT, *settings, *arguments])


class Outside(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v for k, v in attrs if k in ("src", "href") and v is not None]


def test_the_report_is_complete_and_fetches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = call("--policy", "paper", "--policy", "adaptive", "--report", str(out), "--json")
    assert result.exit_code == 0, result.output
    page = out.read_text(encoding="utf-8")
    outside = Outside()
    outside.feed(page)
    assert outside.found == []
    page = unescape(re.sub("<[^>]*>", "", page))
    runs = json.loads(result.stdout)["runs"]
    for name, found in runs.items():
        assert found["digest"] in page
        assert f"Parts of the TTFT under {name}" in page
    for words in ("link cut, 60 to 90 s", "prfaas simulate", "seed 1", "goodput", "link egress"):
        assert words in page
    for words in ("TTFT, s: requests below", "TPOT, ms: requests below", "Decisions by reason"):
        assert words in page


def paged(done: ScenarioRun, origin: dict[str, str]) -> str:
    runs = {"paper": figures_of(done)}
    return recorded_page(partial(print_report, done.scenario, runs, origin))


def test_hostile_text_is_escaped() -> None:
    scenario = load_scenario(Path(CUT), [*SHORT, "workload.rate=0.5"])
    evil = "<script>alert(1)</script>&"
    found = run(replace(scenario, title=evil, notes=(evil,)))
    page = paged(found, {"command": f"prfaas {evil}"})
    assert evil not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;") == 3


def test_a_run_without_requests_or_failures_still_has_a_report() -> None:
    scenario = load_scenario(Path(CUT), [*SHORT, "workload.rate=0.0001"])
    setup = replace(scenario.setup, failures=())
    found = run(replace(scenario, setup=setup))
    assert found.results.num_requests == 0
    page = paged(found, {})
    assert "Decisions by reason" in " ".join(re.sub("<[^>]*>", "", page).split())


@pytest.mark.parametrize("option", ["--report", "--series"])
def test_a_missing_directory_is_noticed_before_the_run(option: str, tmp_path: Path) -> None:
    result = call(option, str(tmp_path / "no" / "out"))
    assert isinstance(result.exception, ConfigError)
    assert "is not there" in str(result.exception)


def test_a_sweep_has_no_report(tmp_path: Path) -> None:
    result = call("--sweep", "--report", str(tmp_path / "out.html"))
    assert result.exit_code == 2
    assert "--sweep makes many runs" in result.output
