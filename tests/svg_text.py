"""Texts of an SVG picture that run out of their box, or into another one."""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree

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


def misplaced(picture: str) -> list[str]:
    """Texts outside the smallest box around their anchor, or across the edge of another."""
    root = ElementTree.fromstring(picture)  # noqa: S314
    rects, texts = boxes(root), list(root.iter(f"{SVG}text"))
    assert texts
    return [text.text or "" for text in texts if not _is_placed(text, rects)]


def _is_placed(text: ElementTree.Element, rects: list[Box]) -> bool:
    left, right = extent(text)
    y, anchor = float(text.get("y", 0)), float(text.get("x", 0))
    box = next(each for each in rects if each.has(anchor, y))
    crossed = [
        each
        for each in rects
        if each.top < y < each.bottom
        and (each.left < left < each.right) != (each.left < right < each.right)
    ]
    return box.left <= left and right <= box.right and not crossed
