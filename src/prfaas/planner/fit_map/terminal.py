"""The map as tables for a terminal. Rows that do not differ are printed once."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.planner.fit_map import words
from prfaas.planner.fit_map.make import FitMap, Mix
from prfaas.planner.fit_map.point import Fit

_STYLE = {Fit.PAYS: "green", Fit.DOES_NOT_PAY: "red", Fit.NOT_PROVEN: "yellow"}

Row = tuple[tuple[tuple[str, Fit], ...], str]
"""Cells of a row, and its crossover."""


def print_map(found: FitMap, console: Console) -> None:
    """Write the whole map."""
    console.print(Text(found.title, style="bold"))
    console.print(Text(words.summary(found)))
    console.print(Text(words.LEGEND, style="dim"))
    for mix in found.mixes:
        console.print()
        console.print(_mix_table(found, mix))
        for reason, count in mix.reasons().most_common():
            console.print(f"? {count} points: {reason}", style="yellow", highlight=False)
    for title, rows in words.moved_tables(found):
        console.print()
        console.print(_moved_table(title, rows))


def _mix_table(found: FitMap, mix: Mix) -> Table:
    axes = found.axes
    table = _table(f"{words.lengths(mix)}; gain by bandwidth, bit/s")
    table.add_column("loss")
    table.add_column("round trip")
    for bits_per_s in axes.bits_per_s:
        table.add_column(words.bandwidth(bits_per_s), justify="right", no_wrap=True)
    table.add_column("pays from", justify="right", no_wrap=True)
    for losses, rows in _blocks(found, mix):
        shown = words.between([words.loss(ratio) for ratio in losses])
        for row, group in groupby(zip(axes.rtt_s, rows, strict=True), key=lambda pair: pair[1]):
            cells, crossover = row
            rtt = words.between([f"{rtt_s * 1e3:g}" for rtt_s, _ in group]) + " ms"
            styled = (Text(text, style=_STYLE[fit]) for text, fit in cells)
            table.add_row(shown, rtt, *styled, crossover)
            shown = ""
    return table


def _blocks(found: FitMap, mix: Mix) -> list[tuple[list[float], tuple[Row, ...]]]:
    """Losses whose rows are all alike, and their rows by round trip."""
    rows = [
        (ratio, tuple(_row(found, mix, ratio, rtt_s) for rtt_s in found.axes.rtt_s))
        for ratio in found.axes.loss
    ]
    grouped = groupby(rows, key=lambda pair: pair[1])
    return [([ratio for ratio, _ in group], block) for block, group in grouped]


def _row(found: FitMap, mix: Mix, ratio: float, rtt_s: float) -> Row:
    points = [mix.points[ratio, rtt_s, bits_per_s] for bits_per_s in found.axes.bits_per_s]
    cells = tuple((words.gain(point), point.fit) for point in points)
    return cells, mix.crossovers[ratio, rtt_s].text


def _moved_table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = _table(title)
    table.add_column("change")
    table.add_column("pays from", justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 1, 0, 0),
    )
