"""CONTRIBUTING.md answers where to change what, and each answer is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import prfaas

SOURCE = Path(prfaas.__file__).parent
PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
QUESTIONS = (
    "a scorer",
    "a codec",
    "a storage tier",
    "an OpenAI field",
    "what happens when a transfer is late",
    "an alarm",
    "a metric",
    "the cache salt",
    "the retry budget",
    "the plan's verdict sentence",
    "where a purge is decided",
    "where a block is evicted",
    "who may sign a ticket",
    "the price of a byte",
    "a Kubernetes source",
    "a console page",
    "a drill",
    "a simulator event",
    "the record layer",
    "the demo",
)
"""The twenty places that a reader who has never seen the code has to find."""
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
PLACE = re.compile(r"`([\w/*<>-]+\.(?:py|md|tsx))`(?: \(((?:`\w+`(?:, )?)+)\))?")
OUTSIDE = ("README.md", "console/", "docs/", "tests/")
"""Paths that are relative to the repository; all others are to the source."""


def rows() -> dict[str, str]:
    """Places and their companions, by change."""
    table = PAGE.read_text(encoding="utf-8").partition("## Where to change what")[2]
    return {change: f"{place} {also}" for change, place, also in ROW.findall(table)[1:]}


def names_in(file: Path) -> set[str]:
    """Functions, classes and constants that a module defines."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_reader_finds_where_to_change_it(question: str) -> None:
    [answer] = [places for change, places in rows().items() if change.startswith(question)]
    assert PLACE.search(answer)


def test_every_place_exists_and_defines_what_the_table_names() -> None:
    places = [found for answer in rows().values() for found in PLACE.findall(answer)]
    assert len(places) > 50
    for path, names in places:
        root = PAGE.parent if path.startswith(OUTSIDE) else SOURCE
        files = list(root.glob(re.sub(r"<\w+>", "*", path)))
        assert files, path
        for name in re.findall(r"\w+", names):
            assert any(name in names_in(file) for file in files), (path, name)
