"""The map as one SVG picture: a row for each question, a panel for each mix of lengths.

Written here and not by plotly, which needs a browser to write SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from prfaas import units as w
from prfaas.planner.fit_map.make import FitMap, Mix
from prfaas.planner.fit_map.point import Fit
from prfaas.planner.fit_map.view import MARK, transport

_CELL_W, _CELL_H = 34, 18
_LEFT, _GAP, _TOP = 62, 26, 46
_PANEL_TOP, _PANEL_BOTTOM = 46, 24
_LEGEND_H = 66
_FILL = {Fit.PAYS: "#7fc8a9", Fit.DOES_NOT_PAY: "#e8a17d", Fit.NOT_PROVEN: "#f5e3a1"}
"""Light tints of Okabe-Ito colours; the mark in each cell has the same meaning."""
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 5", "12 4")
_STYLE = (
    "text { font: 14px system-ui, 'DejaVu Sans', sans-serif; fill: #222 } .m { font-size: 12px } "
    ".b { font-weight: 600 } .line { fill: none; stroke: #111; stroke-width: 2 }"
)


def svg(maps: Sequence[FitMap]) -> str:
    """The picture of maps with the same axes.

    Cells are at the middle loss; lines are crossovers at every loss.
    """
    axes = maps[0].axes
    panel_w = _LEFT + _CELL_W * len(axes.bits_per_s)
    panel_h = _PANEL_TOP + _CELL_H * len(axes.rtt_s) + _PANEL_BOTTOM
    width = max(_GAP + len(axes.length_factors) * (panel_w + _GAP), _least_width(maps))
    height = _TOP + len(maps) * (panel_h + _GAP) + _LEGEND_H
    parts = [_rect(0, 0, width, height, "#ffffff"), *_headline(maps[0])]
    for row, found in enumerate(maps):
        top = _TOP + row * (panel_h + _GAP)
        parts.append(_text(_GAP, top + 14, found.title, "b"))
        for column, mix in enumerate(found.mixes):
            parts += _panel(found, mix, _GAP + column * (panel_w + _GAP), top + _PANEL_TOP)
    parts += _legend(maps[0], height - _LEGEND_H + 14)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img"><title>{escape(_title(maps[0]))}</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _least_width(maps: Sequence[FitMap]) -> int:
    """Width that every title needs, at 10 px a character."""
    titles = [_title(maps[0]), *(found.title for found in maps)]
    return max(760, 2 * _GAP + 10 * max(map(len, titles)))


def _title(found: FitMap) -> str:
    loss = w.loss(found.shown_loss)
    return f"Gain at equal cost at {loss} loss, {transport(found.transport)}"


def _headline(found: FitMap) -> Iterator[str]:
    yield _text(_GAP, 24, _title(found), "b")


def _panel(found: FitMap, mix: Mix, left: float, top: float) -> Iterator[str]:
    axes = found.axes
    cells = left + _LEFT
    yield _text(cells, top - 10, f"mean {mix.mean_tokens:,.0f} new tokens", "m")
    for row, rtt_s in enumerate(axes.rtt_s):
        y = top + row * _CELL_H
        yield _text(cells - 6, y + 13, f"{rtt_s * 1e3:g} ms", "m", "end")
        for column, bits_per_s in enumerate(axes.bits_per_s):
            point = mix.points[found.shown_loss, rtt_s, bits_per_s]
            x = cells + column * _CELL_W
            yield _rect(x, y, _CELL_W, _CELL_H, _FILL[point.fit], "#ffffff")
            yield _text(x + _CELL_W / 2, y + 13, MARK[point.fit], "m", "middle")
    bottom = top + len(axes.rtt_s) * _CELL_H
    for column, bits_per_s in enumerate(axes.bits_per_s):
        x = cells + (column + 0.5) * _CELL_W
        yield _text(x, bottom + 15, w.short_bandwidth(bits_per_s), "m", "middle")
    for index, loss in enumerate(axes.loss):
        yield from _crossovers(found, mix, loss, (cells, top), _DASHES[index % len(_DASHES)])


def _crossovers(
    found: FitMap, mix: Mix, loss: float, origin: tuple[float, float], dash: str
) -> Iterator[str]:
    """Lines through the crossovers of neighbouring round trips; none where it never pays."""
    left, top = origin
    runs: list[list[tuple[float, float]]] = [[]]
    for row, rtt_s in enumerate(found.axes.rtt_s):
        column = _column(found.axes.bits_per_s, mix.crossovers[loss, rtt_s].bits_per_s)
        if column is None:
            runs.append([])
            continue
        x, y = left + column * _CELL_W, top + row * _CELL_H
        runs[-1] += [(x, y), (x, y + _CELL_H)]
    for run in filter(None, runs):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<polyline class="line"{dashes} points="{points}"/>'


def _column(axis: Sequence[float], bits_per_s: float) -> float | None:
    """Position of a bandwidth on the axis, columns; None outside the drawn ones."""
    if not bits_per_s or math.isinf(bits_per_s) or len(axis) < 2:
        return None
    for index, (low, high) in enumerate(pairwise(axis)):
        if low <= bits_per_s <= high:
            return index + 0.5 + math.log(bits_per_s / low) / math.log(high / low)
    return None


def _legend(found: FitMap, top: float) -> Iterator[str]:
    x = float(_GAP)
    for fit in Fit:
        yield _rect(x, top, _CELL_W, _CELL_H, _FILL[fit], "#ffffff")
        yield _text(x + _CELL_W / 2, top + 13, MARK[fit], "m", "middle")
        yield _text(x + _CELL_W + 6, top + 13, fit.value, "m")
        x += _CELL_W + 30 + 8 * len(fit.value)
    yield _text(x, top + 13, "across: bandwidth, bit/s; down: round trip", "m")
    x = float(_GAP)
    yield _text(x, top + 43, "gain is zero at a loss of", "m")
    x += 200
    for index, loss in enumerate(found.axes.loss):
        dash = _DASHES[index % len(_DASHES)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        points = f"{x:.1f},{top + 39:.1f} {x + 40:.1f},{top + 39:.1f}"
        yield f'<polyline class="line"{dashes} points="{points}"/>'
        yield _text(x + 46, top + 43, w.loss(loss), "m")
        x += 70 + 8 * len(w.loss(loss))


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "") -> str:
    border = f' stroke="{stroke}"' if stroke else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}"{border}/>'
    )


def _text(x: float, y: float, text: str, css: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'
    )
