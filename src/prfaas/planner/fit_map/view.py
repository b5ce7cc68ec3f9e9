"""The map for people: tables for a terminal or a page.

Rows that do not differ are printed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas import units as w
from prfaas.core.transfer.tcp_goodput import TcpEnds
from prfaas.planner.fit_map.make import FitMap, Mix, Moved
from prfaas.planner.fit_map.point import PLANNER_ERROR, Fit, Point
from prfaas.planner.problem import HOST_GPUS
from prfaas.presentation import plain_table

MARK = {Fit.PAYS: "+", Fit.DOES_NOT_PAY: "-", Fit.NOT_PROVEN: "?"}
LEGEND = (
    f"+ pays by more than {PLANNER_ERROR:.0%}, the planner's error, on measured ground; "
    "- does not pay; ? not yet proven"
)
MOVED_MIN = 0.02
"""Changes that move the crossover by less are left out of tables."""
_STYLE = {Fit.PAYS: "green", Fit.DOES_NOT_PAY: "red", Fit.NOT_PROVEN: "yellow"}

Row = tuple[tuple[tuple[str, Fit], ...], str]
"""Cells of a row, and its crossover."""


def print_maps(maps: Sequence[FitMap], console: Console) -> None:
    """Write whole maps."""
    for index, found in enumerate(maps):
        if index:
            console.print()
        _print_map(found, console)


def _print_map(found: FitMap, console: Console) -> None:
    console.print(Text(found.title, style="bold"))
    console.print(Text(summary(found)))
    console.print(Text(LEGEND, style="dim"))
    for mix in found.mixes:
        console.print()
        console.print(_mix_table(found, mix))
        for reason, count in mix.reasons().most_common():
            console.print(f"? {count} points: {reason}", style="yellow", highlight=False)
    for title, rows in _moved_tables(found):
        table = plain_table(title, "change", "pays from")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)


def summary(found: FitMap) -> str:
    """The map in one sentence."""
    counts = ", ".join(f"{found.count(fit)} {fit.value}" for fit in Fit)
    return f"{found.axes.num_points} points: {counts} ({transport(found.transport)})"


def transport(used: TcpEnds) -> str:
    """Congestion control and pool nodes."""
    nodes = (
        f"{used.num_nodes} pool nodes" if used.num_nodes else f"a pool node for {HOST_GPUS} GPUs"
    )
    return f"{used.control}, {nodes}"


def _mix_table(found: FitMap, mix: Mix) -> Table:
    of_plan = "as planned" if mix.factor == 1 else f"{mix.factor:g} x as planned"
    lengths = f"mean {mix.mean_tokens:,.0f} new tokens, {of_plan}"
    table = plain_table(f"{lengths}; gain by bandwidth, bit/s", "loss", padding=1)
    table.add_column("round trip")
    for bits_per_s in found.axes.bits_per_s:
        table.add_column(w.short_bandwidth(bits_per_s), justify="right", no_wrap=True)
    table.add_column("pays from", justify="right", no_wrap=True)
    for losses, rows in _blocks(found, mix):
        shown = _between([w.loss(ratio) for ratio in losses])
        pairs = zip(found.axes.rtt_s, rows, strict=True)
        for (cells, crossover), group in groupby(pairs, key=lambda pair: pair[1]):
            rtt = _between([f"{rtt_s * 1e3:g}" for rtt_s, _ in group]) + " ms"
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
    return tuple((_gain(point), point.fit) for point in points), mix.crossovers[ratio, rtt_s].text


def _gain(point: Point) -> str:
    """Mark and gain: +18%, -39%, ?+3%."""
    mark = "?" if point.fit is Fit.NOT_PROVEN else ""
    return f"{mark}+inf" if math.isinf(point.gain) else f"{mark}{min(point.gain, 9.99):+.0%}"


def _between(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _moved_tables(found: FitMap) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Title and rows of the crossover's movers; equal round trips are listed once."""
    groups = groupby(found.moved, key=lambda each: (each.base.text, _moved_rows(each)))
    for (crossover, rows), group in groups:
        rtts = _between([f"{each.path.rtt_s * 1e3:g}" for each in group])
        at = f"{rtts} ms and {w.loss(found.shown_loss)} loss"
        title = f"Crossover with the plan's lengths at {at}: {crossover}. What would move it"
        yield title, rows or [("no single change of those tried", crossover)]


def _moved_rows(moved: Moved) -> list[tuple[str, str]]:
    return [
        (mover.what, mover.crossover.text)
        for mover in moved.movers
        if abs(mover.ratio - 1) > MOVED_MIN
    ]
