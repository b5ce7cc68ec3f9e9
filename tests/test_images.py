"""Pictures of the documentation: no text runs out of its box, nor into another one."""

import re
from pathlib import Path

import pytest

from tests.svg_text import misplaced

ROOT = Path(__file__).parents[1]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_every_text_stays_within_its_box(picture: Path) -> None:
    assert misplaced(picture.read_text()) == []


def test_the_readme_shows_a_picture_that_is_there() -> None:
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert shown
    assert all((ROOT / path).exists() for path in shown)
