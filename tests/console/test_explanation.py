"""The interactive explanation: its numbers are the planner's, and the built page carries them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import explanation
from prfaas.cli.main import cli
from prfaas.gateway.console.routes import assets
from prfaas.planner.answer.plan import make_plan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src/prfaas/gateway/console/assets/learn.html"
PAGE_BYTES_MAX = 300_000
NUM_ANSWERS = 6


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """What the page draws."""
    found: dict[str, Any] = json.loads((ROOT / "console/src/learn/data.json").read_text())
    return found


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_the_page_carries_the_data_and_is_small(data: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(page.encode()) < PAGE_BYTES_MAX
    packed = re.search(r'id="data" type="text/plain">([^<]+)<', page)
    assert packed is not None
    assert json.loads(zlib.decompress(base64.b64decode(packed[1]), wbits=-15)) == data


def test_the_page_asks_no_other_host() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', page)
    style = page.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_one_prompt_is_the_simulator_s(data: dict[str, Any]) -> None:
    assert as_json(explanation.one_prompt()) == data["one"]


def test_many_prompts_are_the_simulator_s(data: dict[str, Any]) -> None:
    assert as_json(explanation.many_prompts()) == data["many"]


def test_trouble_is_the_simulator_s_and_nobody_gets_an_error(data: dict[str, Any]) -> None:
    assert as_json(explanation.trouble()) == data["trouble"]
    runs = [run for clip in data["trouble"]["clips"].values() for run in clip["runs"].values()]
    assert [run["errors"] for run in runs] == [0] * len(runs)


def test_answers_are_the_planner_s(data: dict[str, Any]) -> None:
    yours = data["yours"]
    assert yours["templates"] == [explanation.template_of(plan) for plan in explanation.PLANS]
    places = list(explanation.grid())
    assert len(yours["answers"]) == NUM_ANSWERS * len(places)
    for number in range(0, len(places), 41):
        plan, fleet, link, median = places[number]
        text = explanation.plan_text(
            yours["templates"][plan],
            explanation.FLEETS[fleet],
            explanation.BANDWIDTHS[link],
            explanation.MEDIANS[median],
        )
        shown = yours["answers"][number * NUM_ANSWERS : (number + 1) * NUM_ANSWERS]
        assert explanation.answer(text) == shown, places[number]
        if number % 8 == 0:
            found = make_plan(explanation.question_of(text))
            assert round(100 * found.exact.gain) == shown[1], places[number]
            against = {explanation.PAYS: "does not pay", explanation.DOES_NOT_PAY: "pays"}
            assert found.verdict.answer.value != against.get(shown[0]), places[number]


def test_the_words_of_the_page_hold(data: dict[str, Any]) -> None:
    rows = data["one"]["models"]["hybrid"]["links"]["5"]
    saved = [row[0][-1] - row[4] for row in rows]
    assert saved[0] < 0 < saved[-1]
    assert saved == sorted(saved), "a longer prompt saves more"
    assert all(
        row[0][-1] < row[4]
        for by_length in data["one"]["models"]["dense"]["links"].values()
        for row in by_length
    )
    page = (ROOT / "console/src/learn/page.tsx").read_text()
    fixed = (rows[0][3] - data["one"]["lengths"][0] * 17_280) / 1e6
    assert f"{fixed:.0f} MB of notes however short" in page
    first = data["one"]["lengths"].index(21_500)
    dense = data["one"]["models"]["dense"]["links"]["5"][first][3]
    assert f"{dense / rows[first][3]:.0f} times less" in " ".join(page.split())
    assert f"Now {data['many']['rate_per_s']} prompts come each second" in page
    shares = [run["in_time"] for run in data["many"]["runs"]]
    best = shares.index(max(shares))
    near = [run["threshold"] for run in data["many"]["runs"]].index(data["many"]["optimum"])
    assert abs(best - near) <= 1
    assert shares[0] < shares[best] / 2 > shares[-1]


def test_the_gateway_allows_the_page_s_own_script_and_no_other() -> None:
    policy = assets()["learn.html"].policy
    assert re.search(r"script-src 'self' 'sha256-[^']+';", policy)
    assert "unsafe" not in policy
    assert "sha256" not in assets()["index.html"].policy


def test_learn_writes_and_prints_the_page(tmp_path: Path) -> None:
    out = tmp_path / "explanation.html"
    written = CliRunner().invoke(cli, ["learn", "--out", str(out)])
    assert written.exit_code == 0, written.output
    assert out.read_bytes() == PAGE.read_bytes()
    printed = CliRunner().invoke(cli, ["learn", "--print"])
    assert Path(printed.output.strip()).read_bytes() == PAGE.read_bytes()
    missing = CliRunner().invoke(cli, ["learn", "--out", str(tmp_path / "no" / "x.html")])
    assert "No such file or directory" in str(missing.exception)
