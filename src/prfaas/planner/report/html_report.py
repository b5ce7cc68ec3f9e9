"""The plan as one self-contained HTML file that opens without a network, and its figures."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from prfaas import units as w
from prfaas.planner.answer.plan import Plan
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.report import terminal as tables
from prfaas.planner.solve.search import (
    Bottleneck,
    Curve,
    against_split,
    against_threshold,
    best_of_each_split,
)
from prfaas.presentation import html_figure, html_page, html_table

# Okabe-Ito colours, distinguishable with any colour vision.
_COLOURS = {
    "PrfaaS": "#0072b2",
    "PD-P": "#e69f00",
    "PD-D": "#009e73",
    "Λ": "#111111",
}
_LOSS = "#d55e00"
_HEIGHT = 380
_TICKS_MAX = 9
_VIEW = 0.97  # the threshold axis ends where 97 % of requests are local
_STAGE_VIEW = 3.0  # stages that bind at more than three times Λ are cut off
_HEADROOM = 1.7  # stages far above Λ are cut off, not drawn in full


def threshold_figure(plan: Plan) -> Any:
    """Λ against t, with the stages that bound it."""
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    curve = against_threshold(problem, found)
    figure = _rates(curve, curve.x / 1e3)
    at = (found.offload_threshold or 0.0) / 1e3
    _mark(figure, at, found.rate_per_s, f"t = {w.tokens(found.whole_threshold)}")
    last = problem.workload.lengths.quantile(_VIEW) / 1e3
    figure.update_xaxes(
        title="offload threshold t, thousand tokens", range=[0, max(last, at * 1.2)]
    )
    return _titled(
        figure,
        f"Λ against the threshold at N_p : N_d = {found.num_prefill} : {found.num_decode}",
        curve,
    )


def split_figure(plan: Plan) -> Any:
    """Λ against N_p : N_d, at the best threshold overall and at each split's own."""
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    curve = against_split(problem, found)
    labels = [f"{int(n)} : {problem.pd.num_instances - int(n)}" for n in curve.x]
    figure = _rates(curve, labels, markers=True)
    best, _ = best_of_each_split(problem, found.mode)
    figure.add_scatter(
        x=labels,
        y=best,
        name="Λ, t re-optimised",
        mode="lines+markers",
        line={"color": "#666666", "dash": "dot"},
    )
    _mark(figure, labels[found.num_prefill], found.rate_per_s, "best")
    every = -(-len(labels) // _TICKS_MAX)
    figure.update_xaxes(title="N_p : N_d", tickvals=labels[::every], tickangle=0)
    return _titled(
        figure, f"Λ against the split at t = {w.tokens(found.whole_threshold)} tokens", curve
    )


_ON_BAR = {
    Bottleneck.PRFAAS_COMPUTE: "white",
    Bottleneck.PRFAAS_NETWORK: "#1f2328",
    Bottleneck.PD_PREFILL: "#1f2328",
    Bottleneck.PD_DECODE: "white",
    Bottleneck.TTFT_TARGET: "white",
}
"""Colour of the text on each stage's bar, dark on the light ones."""


def stages_figure(plan: Plan) -> Any:
    """Rate at which each stage alone would bind, and Λ."""
    found = plan.exact.prfaas.operation
    finite = {s: c for s, c in found.capacity_per_s.items() if np.isfinite(c)}
    colours = {
        Bottleneck.PRFAAS_COMPUTE: _COLOURS["PrfaaS"],
        Bottleneck.PRFAAS_NETWORK: "#56b4e9",
        Bottleneck.PD_PREFILL: _COLOURS["PD-P"],
        Bottleneck.PD_DECODE: _COLOURS["PD-D"],
        Bottleneck.TTFT_TARGET: "#7f3f98",
    }
    figure = go.Figure()
    figure.add_bar(
        x=list(finite.values()),
        y=[stage.value for stage in finite],
        orientation="h",
        marker_color=[colours[stage] for stage in finite],
        text=[f"{c:.2f} req/s, {found.slack(s):.0%} slack" for s, c in finite.items()],
        textposition="inside",
        insidetextanchor="start",
        insidetextfont={"color": [_ON_BAR[stage] for stage in finite]},
    )
    rate_line = {"color": _COLOURS["Λ"], "dash": "dash"}
    figure.add_vline(x=found.rate_per_s, line=rate_line, layer="below")
    figure.update_yaxes(autorange="reversed")
    last = min(max(finite.values()), _STAGE_VIEW * found.rate_per_s) * 1.02
    figure.update_xaxes(
        title="rate at which the stage binds, req/s (dashed: Λ_max)", range=[0, last]
    )
    return _styled(figure, "Stage throughputs: what binds, and the slack of the rest")


def egress_figure(plan: Plan) -> Any:
    """Traffic at Λ_max against the links, and the bandwidth below which it stops paying."""
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    bars = {
        "egress at Λ_max": found.egress_bits_per_s,
        "links": sum(c.goodput_bits_per_s for c in problem.prfaas),
    }
    if plan.break_even_bits_per_s:
        bars["break-even bandwidth"] = plan.break_even_bits_per_s
    figure = go.Figure()
    figure.add_bar(
        x=[bits / 1e9 for bits in bars.values()],
        y=list(bars),
        orientation="h",
        marker_color=["#0072b2", "#bbbbbb", "#d55e00"][: len(bars)],
        text=[w.bandwidth(bits) for bits in bars.values()],
        textposition="outside",
        textangle=0,
        cliponaxis=False,
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="Gbit/s", range=[0, max(bars.values()) / 1e9 * 1.25])
    return _styled(figure, "Egress")


def cost_figure(plan: Plan) -> Any:
    """Price of a million prompt tokens in each design, both modes."""
    figure = go.Figure()
    for name, comparison, colour in (
        ("exact", plan.exact, "#0072b2"),
        ("paper's mean lengths", plan.paper, "#9ecae9"),
    ):
        shown = [d for d in comparison.all if np.isfinite(d.price_per_mtoken)]
        figure.add_bar(
            x=[d.price_per_mtoken for d in shown],
            y=[d.name for d in shown],
            orientation="h",
            name=name,
            marker_color=colour,
            text=[w.price(d.price_per_mtoken) for d in shown],
            textposition="auto",
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="price of one million prompt tokens, in the plan file's currency")
    return _styled(figure, "Cost per million prompt tokens")


def tornado_figure(plan: Plan) -> Any:
    """Gain at equal cost with every input 20 % lower and higher."""
    base = plan.exact.gain
    swings = plan.tornado
    figure = go.Figure()
    for name, values, colour in (
        ("20 % lower", [s.low for s in swings], "#0072b2"),
        ("20 % higher", [s.high for s in swings], "#e69f00"),
    ):
        figure.add_bar(
            x=[(v - base) * 100 for v in values],
            y=[s.what for s in swings],
            base=base * 100,
            orientation="h",
            name=name,
            marker_color=colour,
            customdata=[v * 100 for v in values],
            hovertemplate="%{y}: %{customdata:+.1f} %<extra></extra>",
        )
    figure.add_vline(x=0, line={"color": _LOSS, "width": 2})
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title="gain at equal cost, % (red line: it stops paying)")
    height = max(_HEIGHT, 34 * len(swings) + 120)
    return _styled(figure, "Sensitivity: one input 20 % off, settings re-optimised", height)


def _rates(curve: Curve, x: Any, *, markers: bool = False) -> Any:
    figure = go.Figure()
    mode = "lines+markers" if markers else "lines"
    for name, label, values in (
        ("PrfaaS", "Θ_prfaas / p", curve.prfaas),
        ("PD-P", "Θ_pd-p / (1 − p)", curve.pd_prefill),
        ("PD-D", "Θ_pd-d", curve.decode),
        ("Λ", "Λ", curve.rate),
    ):
        line = {"color": _COLOURS[name], "width": 4 if name == "Λ" else 2}
        figure.add_scatter(x=x, y=values, name=label, mode=mode, line=line)
    return figure


def _mark(figure: Any, x: Any, y: float, text: str) -> None:
    figure.add_scatter(
        x=[x],
        y=[y],
        mode="markers",
        marker={"color": _LOSS, "size": 11},
        showlegend=False,
    )
    figure.add_annotation(
        x=x,
        y=y,
        text=f"{text}, Λ = {y:.2f}",
        ax=0,
        ay=95,
        arrowcolor=_LOSS,
        bgcolor="rgba(255,255,255,0.85)",
    )


def _titled(figure: Any, title: str, curve: Curve) -> Any:
    top = float(np.nanmax(curve.rate)) * _HEADROOM
    figure.update_yaxes(title="req/s", range=[0, top])
    return _styled(figure, title)


def _styled(figure: Any, title: str, height: int = _HEIGHT) -> Any:
    figure.update_layout(
        title={"text": title, "x": 0, "xanchor": "left", "font": {"size": 16}},
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 40, "t": 50, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0, "xanchor": "left"},
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True, ticksuffix=" ")
    return figure


_ANSWER_CLASS = {
    VerdictAnswer.PAYS: "pays",
    VerdictAnswer.DOES_NOT_PAY: "does-not-pay",
    VerdictAnswer.DEPENDS: "depends",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: .4em; }
h2 { font-size: 1.2em; margin-top: 2em; }
.verdict { padding: .9em 1.1em; border-left: 6px solid; font-size: 1.1em; }
.pays { background: #e6f5ef; border-color: #009e73; }
.does-not-pay { background: #fbeae2; border-color: #d55e00; }
.depends { background: #fdf4df; border-color: #e69f00; }
table { border-collapse: collapse; width: 100%; margin: .6em 0 1.2em; }
th, td { text-align: right; padding: .3em .7em; border-bottom: 1px solid #ddd; }
th { color: #555; font-weight: 600; }
th + th, td + td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr));
        gap: 1.5em; }
.pair > div { min-width: 0; }
.narrow { max-width: 620px; }
.notes { color: #7a4a00; }
.sources th, .sources td { text-align: left; vertical-align: top; }
.sources td + td { white-space: normal; }
small { color: #666; }
"""


def html_report(plan: Plan) -> str:
    """The whole report; plotly.js is inside, so the file is about 5 MB."""
    problem, verdict = plan.question.problem, plan.verdict
    body = [
        f"<h1>{escape(problem.title)}</h1>",
        f'<p class="verdict {_ANSWER_CLASS[verdict.answer]}">{escape(verdict.sentence)}</p>',
        *(f'<p class="notes">{escape(note)}.</p>' for note in plan.notes),
        '<div class="pair">',
        html_figure(threshold_figure(plan), first=True),
        html_figure(split_figure(plan)),
        "</div>",
        "<h2>Designs</h2>",
        *map(html_table, tables.designs_tables(plan, wide=True)),
        html_table(tables.throughputs_table(plan)),
        '<div class="pair">',
        html_figure(stages_figure(plan)),
        html_figure(egress_figure(plan)),
        "</div>",
        html_figure(cost_figure(plan)),
        *map(html_table, tables.coding_tables(plan)),
        "<h2>Break-even points</h2>",
        html_table(tables.facts_table(plan), css="narrow"),
        html_table(tables.shadow_table(plan), css="narrow"),
        html_table(tables.latency_table(plan, wide=True)),
        "<h2>What would change the answer</h2>",
        html_figure(tornado_figure(plan)),
        "<h2>Sources of the numbers</h2>",
        html_table(tables.sources_table(plan), css="sources"),
    ]
    return html_page(problem.title, _STYLE, body)
