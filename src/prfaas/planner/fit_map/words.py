"""Words of the map: axes, cells and reasons as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from prfaas.core.transfer.tcp_goodput import TcpEnds
from prfaas.planner.fit_map.make import FitMap, Mix, Moved
from prfaas.planner.fit_map.point import PLANNER_ERROR, Fit, Point
from prfaas.planner.problem import HOST_GPUS

TITLE = "Where prefill-as-a-service fits"
MARK = {Fit.PAYS: "+", Fit.DOES_NOT_PAY: "-", Fit.NOT_PROVEN: "?"}
"""Mark of a cell in pictures, which are too small for the gain."""
LEGEND = (
    f"+ pays by more than {PLANNER_ERROR:.0%}, the planner's error, on measured ground; "
    "- does not pay; ? not yet proven"
)
MOVED_MIN = 0.02
"""Changes that move the crossover by less are left out of tables."""


def bandwidth(bits_per_s: float) -> str:
    """A bandwidth of the axis: 2.5G, 400M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if bits_per_s >= size:
            return f"{bits_per_s / size:g}{unit}"
    return f"{bits_per_s:g}"


def loss(ratio: float) -> str:
    """A loss: 0, 0.1 %."""
    return "0" if not ratio else f"{ratio * 100:g} %"


def gain(point: Point) -> str:
    """Mark and gain: +18%, -39%, ?+3%."""
    mark = "?" if point.fit is Fit.NOT_PROVEN else ""
    if math.isinf(point.gain):
        return f"{mark}+inf"
    return f"{mark}{min(point.gain, 9.99):+.0%}"


def lengths(mix: Mix) -> str:
    """A mix of lengths: "mean 27,486 new tokens, as planned"."""
    of_plan = "as planned" if mix.factor == 1 else f"{mix.factor:g} x as planned"
    return f"mean {mix.mean_tokens:,.0f} new tokens, {of_plan}"


def transport(used: TcpEnds) -> str:
    """Congestion control and pool nodes."""
    nodes = (
        f"{used.num_nodes} pool nodes" if used.num_nodes else f"a pool node for {HOST_GPUS} GPUs"
    )
    return f"{used.control}, {nodes}"


def between(values: Sequence[str]) -> str:
    """The first, or the first and last of several."""
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def summary(found: FitMap) -> str:
    """The map in one sentence."""
    counts = ", ".join(f"{found.count(fit)} {fit.value}" for fit in Fit)
    return f"{found.axes.num_points} points: {counts} ({transport(found.transport)})"


def moved_tables(found: FitMap) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Title and rows of the crossover's movers; equal round trips are listed once."""
    groups = groupby(found.moved, key=lambda each: (each.base.text, _moved_rows(each)))
    for (crossover, rows), group in groups:
        rtts = between([f"{each.path.rtt_s * 1e3:g}" for each in group])
        at = f"{rtts} ms and {loss(found.shown_loss)} loss"
        title = f"Crossover with the plan's lengths at {at}: {crossover}. What would move it"
        yield title, rows or [("no single change of those tried", crossover)]


def _moved_rows(moved: Moved) -> list[tuple[str, str]]:
    """Changes that matter, and the crossover with each."""
    return [
        (mover.what, mover.crossover.text)
        for mover in moved.movers
        if abs(mover.ratio - 1) > MOVED_MIN
    ]
