"""docs/results/fit.md holds what the code takes from it."""

from __future__ import annotations

import re

import pytest

from prfaas.planner.fit_map.point import PLANNER_ERROR
from tests.planner.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "results" / "fit.md").read_text()


def table(title: str) -> list[dict[str, str]]:
    """The first table whose head has a column of that title."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and title in line)
    head = cells(lines[start])
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(head, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def percent(text: str) -> float:
    return float(text.rstrip("%")) / 100


def test_the_simulator_confirms_the_sign_of_every_gain_beyond_the_planners_error() -> None:
    rows = table("signs agree")
    assert len(rows) >= 40
    far = [row for row in rows if abs(percent(row["gain, planner"])) > PLANNER_ERROR]
    assert len(far) >= 30
    assert {row["signs agree"] for row in far} == {"yes"}
    for row in far:
        assert percent(row["gain, planner"]) * percent(row["gain, simulator"]) > 0


def test_the_planners_error_is_the_largest_difference_to_the_simulator() -> None:
    largest = max(
        abs(percent(row["gain, planner"]) - percent(row["gain, simulator"]))
        for row in table("signs agree")
    )
    assert largest <= PLANNER_ERROR
    assert pytest.approx(largest, abs=0.01) == PLANNER_ERROR


def test_points_that_pay_are_confirmed() -> None:
    paying = [row for row in table("signs agree") if row["map"] == "pays"]
    assert len(paying) >= 4
    assert all(percent(row["gain, simulator"]) > 0 for row in paying)


def test_the_page_shows_both_pictures() -> None:
    assert re.findall(r"\.\./images/fit-(\w+)\.svg", PAGE) == ["bbr", "cubic"]
