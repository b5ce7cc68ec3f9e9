"""docs/results/fit-simulator.csv holds what the code takes from it."""

from __future__ import annotations

import csv
import re

import pytest

from prfaas.planner.fit_map.point import PLANNER_ERROR
from tests.planner.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "results" / "fit.md").read_text()
POINTS = REPOSITORY / "docs" / "results" / "fit-simulator.csv"


def points() -> list[dict[str, str]]:
    """Points of the map that the simulator confirmed, or did not."""
    with POINTS.open() as file:
        return list(csv.DictReader(file))


def percent(text: str) -> float:
    return float(text.rstrip("%")) / 100


def test_the_simulator_confirms_the_sign_of_every_gain_beyond_the_planners_error() -> None:
    rows = points()
    assert len(rows) >= 40
    far = [row for row in rows if abs(percent(row["gain, planner"])) > PLANNER_ERROR]
    assert len(far) >= 30
    assert {row["signs agree"] for row in far} == {"yes"}
    for row in far:
        assert percent(row["gain, planner"]) * percent(row["gain, simulator"]) > 0


def test_the_planners_error_is_the_largest_difference_to_the_simulator() -> None:
    largest = max(
        abs(percent(row["gain, planner"]) - percent(row["gain, simulator"])) for row in points()
    )
    assert largest <= PLANNER_ERROR
    assert pytest.approx(largest, abs=0.01) == PLANNER_ERROR


def test_points_that_pay_are_confirmed() -> None:
    paying = [row for row in points() if row["map"] == "pays"]
    assert len(paying) >= 4
    assert all(percent(row["gain, simulator"]) > 0 for row in paying)


def test_the_page_shows_both_pictures() -> None:
    assert re.findall(r"\.\./images/fit-(\w+)\.svg", PAGE) == ["bbr", "cubic"]
