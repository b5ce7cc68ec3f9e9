"""Pictures of the documentation: no text runs out of its box, nor into another one."""

import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
EM = {"": 0.6, "b": 0.68}
"""Width of a character, ems: the average of DejaVu Sans, which is wider than other system fonts."""


@dataclass
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def has(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom


def boxes(root: ElementTree.Element) -> list[Box]:
    """Rectangles, the smallest first."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        width, height = float(rect.get("width", 0)), float(rect.get("height", 0))
        found.append(Box(x, y, x + width, y + height))
    return sorted(found, key=lambda box: (box.right - box.left) * (box.bottom - box.top))


def extent(text: ElementTree.Element) -> tuple[float, float]:
    """Left and right end."""
    classes = (text.get("class") or "").split()
    size = 12 if "m" in classes else 14
    width = len(text.text or "") * size * EM["b" if {"b", "n"} & set(classes) else ""]
    x = float(text.get("x", 0))
    shift = {"middle": width / 2, "end": width}.get(text.get("text-anchor", "start"), 0.0)
    return x - shift, x - shift + width


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_every_text_stays_within_its_box(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()  # noqa: S314
    rects = boxes(root)
    texts = list(root.iter(f"{SVG}text"))
    assert texts
    for text in texts:
        left, right = extent(text)
        y = float(text.get("y", 0))
        anchor = float(text.get("x", 0))
        box = next(each for each in rects if each.has(anchor, y))
        assert box.left <= left, text.text
        assert right <= box.right, text.text
        crossed = [
            each
            for each in rects
            if each.top < y < each.bottom
            and (each.left < left < each.right) != (each.left < right < each.right)
        ]
        assert not crossed, text.text


def test_the_readme_shows_a_picture_that_is_there() -> None:
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert shown
    assert all((ROOT / path).exists() for path in shown)
