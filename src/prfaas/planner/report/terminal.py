"""The plan as tables and a plot for a terminal."""

from __future__ import annotations

import numpy as np
import plotext
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from prfaas.planner import formatting as w
from prfaas.planner.answer.plan import Comparison, Plan
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.report.coding import (
    CLASS_HEAD,
    HEAD,
    class_rows,
    coding_rows,
    links_in_words,
)
from prfaas.planner.report.summary import facts, overloads
from prfaas.planner.solve.curves import Curve, against_threshold
from prfaas.planner.solve.designs import Design

_ANSWER_STYLE = {
    VerdictAnswer.PAYS: "green",
    VerdictAnswer.DOES_NOT_PAY: "red",
    VerdictAnswer.DEPENDS: "yellow",
}
_PLOT_ROWS = 16
_PLOT_COLUMNS_MAX = 100
_PLOT_VIEW = 0.97  # the plot ends where 97 % of requests are local


def print_plan(plan: Plan, console: Console) -> None:
    """Write the whole plan."""
    style = f"bold {_ANSWER_STYLE[plan.verdict.answer]}"
    console.print(Text(plan.question.problem.title, style="bold"))
    console.print(Text(plan.verdict.sentence, style=style))
    for part in _parts(plan):
        console.print()
        console.print(part)
    console.print()
    console.print(_threshold_plot(plan, min(console.width, _PLOT_COLUMNS_MAX)), end="")
    for note in plan.notes:
        console.print(f"Note: {note}", style="yellow", highlight=False)


def _parts(plan: Plan) -> list[RenderableType]:
    return [
        _designs_table("Exact expectations E[T(L)]", plan.exact),
        _designs_table("The paper's representative lengths T(E[L])", plan.paper),
        *_coding_table(plan),
        *_class_table(plan),
        _throughputs_table(plan),
        _stages_table(plan),
        _latency_table(plan),
        Group(_shadow_table(plan), _facts(plan)),
        _tornado_table(plan),
    ]


def _table(title: str, *columns: str) -> Table:
    """A table without lines, narrow enough for 80 columns."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", vertical="bottom")
    return table


def _designs_table(title: str, comparison: Comparison) -> Table:
    rates = [design.operation.rate_per_s for design in comparison.all]
    gain = w.percent(comparison.gain, signed=True) if any(rates) else "nothing is carried"
    table = _table(
        f"{title}: {gain} at equal cost",
        "design", "GPUs", "t", "instances", "Λ/s", "egress", "per Mtok",
    )  # fmt: skip
    table.caption = "t in tokens; instances of PrfaaS/PD-P/PD-D; price of 1 M prompt tokens"
    table.caption_justify = "left"
    for design in comparison.all:
        table.add_row(*_design_row(design))
    return table


def _design_row(design: Design) -> tuple[str, ...]:
    found = design.operation
    return (
        design.name,
        w.gpus(design.num_gpus),
        w.tokens(found.whole_threshold),
        f"{found.num_prfaas}/{found.num_prefill}/{found.num_decode}",
        w.rate(found.rate_per_s),
        w.bandwidth(found.egress_bits_per_s) if found.egress_bits_per_s else "-",
        w.price(design.price_per_mtoken),
    )


def _coding_table(plan: Plan) -> list[Table]:
    effect = plan.coding
    if effect is None:
        return []
    table = _table(f"Coding of links, {effect.quality}, exact", *HEAD)
    table.caption = links_in_words(effect)
    table.caption_justify = "left"
    for row in coding_rows(effect):
        table.add_row(*row)
    return [table]


def _class_table(plan: Plan) -> list[Table]:
    if not plan.classes:
        return []
    table = _table("Classes of the links, exact, at this bandwidth", *CLASS_HEAD)
    for row in class_rows(plan.classes):
        table.add_row(*row)
    return [table]


def _throughputs_table(plan: Plan) -> Table:
    table = _table(
        "Stage throughputs Θ, req/s",
        "design", "exact\nprfaas", "\npd-p", "\npd-d", "paper's\nprfaas", "\npd-p", "\npd-d",
    )  # fmt: skip
    for exact, paper in zip(plan.exact.all, plan.paper.all, strict=True):
        both = (exact.operation, paper.operation)
        rates = [r for o in both for r in (o.prfaas_per_s, o.pd_prefill_per_s, o.decode_per_s)]
        table.add_row(exact.name, *(w.rate(rate) for rate in rates))
    return table


def _stages_table(plan: Plan) -> Table:
    found = plan.exact.prfaas.operation
    table = _table(
        f"Stages: {found.binding.value} binds",
        "stage", "binds at Λ, req/s", "slack",
    )  # fmt: skip
    for stage, capacity in found.capacity_per_s.items():
        table.add_row(stage.value, w.rate(capacity), w.percent(found.slack(stage)))
    return table


def _latency_table(plan: Plan) -> Table:
    times = plan.latencies
    table = _table(
        f"Time to first token; queued at {times.arrival_per_s:.2f} req/s (approximate)",
        "design", "service\nmean", "\nP90", "overlap\nmean", "queued\nmean", "\nP90", "\nP99",
    )  # fmt: skip
    table.caption = f"service: the paper's way; P99: range seen in simulation{overloads(times)}"
    table.caption_justify = "left"
    for name, service in times.service.items():
        overlapped, queued = times.overlapped[name], times.queued[name]
        shown = (service.mean, service.p90, overlapped.mean, queued.mean, queued.p90)
        table.add_row(name, *(w.seconds(value) for value in shown), w.between(*queued.p99_range))
    return table


def _shadow_table(plan: Plan) -> Table:
    table = _table("One more unit, settings re-optimised", "unit", "ΔΛ, req/s")
    for value in plan.shadow:
        table.add_row(value.what, f"{value.rate_gain_per_s:+.3f}")
    return table


def _facts(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts(plan):
        table.add_row(Text(name, style="dim"), value)
    return table


def _tornado_table(plan: Plan) -> Table:
    table = _table("Gain at equal cost with one input 20 % off", "input", "-20 %", "+20 %")
    for swing in plan.tornado:
        low, high = (w.percent(x, signed=True) for x in (swing.low, swing.high))
        table.add_row(swing.what, low, high)
    return table


def _threshold_plot(plan: Plan, width: int) -> Text:
    found = plan.exact.prfaas.operation
    curve = against_threshold(plan.question.problem, found)
    last = plan.question.problem.workload.lengths.quantile(_PLOT_VIEW)
    last = max(last, 1.2 * (found.offload_threshold or 0))
    title = f"Λ against the threshold, N_p : N_d = {_split(plan)}"
    return Text.from_ansi(_draw(curve, last, width, title))


def _split(plan: Plan) -> str:
    found = plan.exact.prfaas.operation
    return f"{found.num_prefill} : {found.num_decode}"


def _draw(curve: Curve, last: float, width: int, title: str) -> str:
    """The plot as text; plotext has one figure for the whole process, which is cleared first."""
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _PLOT_ROWS)
    figure.title(title)
    figure.label("t, thousand tokens", "x")
    figure.legend(x=width - 8, y=0, ha="right", va="top")
    top = float(np.nanmax(curve.rate)) * 1.6
    for label, values in (
        ("PrfaaS", curve.prfaas),
        ("PD-P", curve.pd_prefill),
        ("PD-D", curve.decode),
        ("Λ, req/s", curve.rate),
    ):
        keep = np.isfinite(values) & (values <= top) & (curve.x <= last)
        if keep.any():
            points = figure.signal((curve.x[keep] / 1e3).tolist(), values[keep].tolist())
            points.lines()
            points.label(label)
            figure.draw(points)
    return str(figure.build().string())
