"""A comparison of runs as one self-contained HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from prfaas.presentation import html_figure, html_page, html_table, plain_table
from prfaas.sim.engine.failures import in_words
from prfaas.sim.engine.signals import SeriesSample
from prfaas.sim.report.run_figures import RunFigures, comparison_table
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sim.system.setup import Failure, SloSetup
from prfaas.units import NS_PER_S

Runs = Mapping[str, RunFigures]

# Okabe-Ito colours, distinguishable with any colour vision, legible on white and on black.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_PART_COLOURS = {
    "lost_attempts": "#d55e00",
    "queue": "#e69f00",
    "prefill": "#0072b2",
    "transfer": "#56b4e9",
    "decode_admission": "#009e73",
}
_GREY = "#808890"
_GRID = "rgba(128,136,144,0.25)"
_ROW_HEIGHT = 150
_TITLE_HEIGHT = 34
_Y = {"title_standoff": 4, "rangemode": "tozero", "automargin": True}


def colour(index: int) -> str:
    """Colour of a policy by its place."""
    return _COLOURS[index % len(_COLOURS)]


_Line = tuple[str, Callable[[SeriesSample], float]]
_ROWS: tuple[_Line, ...] = (
    ("work before a PD-P instance, s", lambda s: s.local_wait_ns / NS_PER_S),
    ("work before a PrfaaS instance, s", lambda s: s.remote_wait_ns / NS_PER_S),
    ("link backlog, GB", lambda s: s.link_backlog_bytes / 1e9),
    ("requests waiting for decode", lambda s: s.num_decode_waiting),
    ("offload threshold, thousand tokens", lambda s: s.offload_threshold / 1e3),
)
_ROLES: tuple[_Line, ...] = (
    ("PD instances that prefill", lambda s: s.num_prefill),
    ("PD instances that decode", lambda s: s.num_decode),
    ("PrfaaS instances", lambda s: s.num_prfaas),
)


def series_figure(runs: Runs, failures: Sequence[Failure]) -> Any:
    """Link, queues, threshold and roles over time, a line for each policy."""
    lines = _ROWS + tuple(line for line in _ROLES if _changes(runs, line[1]))
    titles = ("link egress and its capacity (dotted), Gbit/s", *(name for name, _ in lines))
    figure = make_subplots(
        rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=0.28 / len(titles)
    )
    for index, (policy, run) in enumerate(runs.items()):
        at_s = [s.at_ns / NS_PER_S for s in run.samples]
        style = {"color": colour(index), "width": 1.5}
        egress = go.Scatter(
            x=run.egress_at_s, y=run.egress_bits_per_s / 1e9, name=policy, line=style
        )
        figure.add_trace(egress, row=1, col=1)
        for row, (_, value) in enumerate(lines, 2):
            y = [value(s) for s in run.samples]
            trace = go.Scatter(x=at_s, y=y, name=policy, line=style, showlegend=False)
            figure.add_trace(trace, row=row, col=1)
    _capacity(figure, next(iter(runs.values())))
    for row, title in enumerate(titles, 1):
        figure.add_annotation(
            text=title,
            x=0,
            y=1,
            xref="x domain" if row == 1 else f"x{row} domain",
            yref="y domain" if row == 1 else f"y{row} domain",
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
        )
    _shade(figure, failures)
    figure.update_yaxes(**_Y)
    figure.update_xaxes(title="time, s", row=len(titles), col=1)
    figure = styled(figure, _ROW_HEIGHT * len(titles) + 80)
    above = _TITLE_HEIGHT / (_ROW_HEIGHT * len(titles))
    return figure.update_layout(legend=_legend(1.0 + above), hovermode="x unified")


def _changes(runs: Runs, value: Callable[[SeriesSample], float]) -> bool:
    return any(len({value(s) for s in run.samples}) > 1 for run in runs.values())


def _capacity(figure: Any, run: RunFigures) -> None:
    """The link's capacity where it is near the egress; far above it would flatten the curve."""
    top = max((float(r) for r in run.egress_bits_per_s), default=0.0) / 1e9
    values = [s.link_bits_per_s / 1e9 for s in run.samples]
    if not values or min(values) > 4 * top:
        return
    figure.add_trace(
        go.Scatter(
            x=[s.at_ns / NS_PER_S for s in run.samples],
            y=values,
            name="capacity",
            line={"color": _GREY, "dash": "dot", "width": 1.5, "shape": "hv"},
        ),
        row=1,
        col=1,
    )


def _shade(figure: Any, failures: Sequence[Failure]) -> None:
    """Spans in which something is broken."""
    for failure in failures:
        figure.add_vrect(
            x0=failure.at_ns / NS_PER_S,
            x1=(failure.at_ns + failure.for_ns) / NS_PER_S,
            fillcolor="#d55e00",
            opacity=0.16,
            line_width=0,
            layer="below",
        )


def breakdown_figure(run: RunFigures) -> Any:
    """Parts of TTFT: the mean, and the mean over ranges of percentiles."""
    rows = {"mean": run.results.ttft_parts, **run.results.ttft_parts_by_percentile}
    figure = go.Figure()
    for part, tint in _PART_COLOURS.items():
        seconds = [parts.get(part, 0.0) / 1e3 for parts in rows.values()]
        if any(seconds):
            figure.add_bar(
                x=seconds,
                y=list(rows),
                name=part.replace("_", " "),
                orientation="h",
                marker_color=tint,
            )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title="s")
    return styled(figure, 300)


def cdf_figure(runs: Runs, slo: SloSetup, *, tpot: bool) -> Any:
    """Share of requests against TTFT (logarithmic) or TPOT; the target is dashed."""
    figure = go.Figure()
    target = slo.tpot_ns if tpot else slo.ttft_ns
    for index, (policy, run) in enumerate(runs.items()):
        values = run.tpot_ms if tpot else run.ttft_s
        line = {"color": colour(index), "width": 2}
        if len(values):
            figure.add_scatter(x=values, y=run.ratios * 100, name=policy, line=line)
    if target is not None:
        at = target / 1e6 if tpot else target / NS_PER_S
        figure.add_vline(x=at, line={"color": _GREY, "dash": "dash"})
    figure.update_xaxes(title="TPOT, ms" if tpot else "TTFT, s", type=None if tpot else "log")
    figure.update_yaxes(title="requests, %", range=[0, 101], title_standoff=4)
    if tpot:
        figure.update_xaxes(rangemode="tozero")
    else:
        figure.update_xaxes(dtick="D2", exponentformat="none")
    return styled(figure, 320)


def reasons_figure(runs: Runs) -> Any:
    """Decisions by reason, share of the requests of each policy."""
    reasons = sorted({reason for run in runs.values() for reason in run.results.decisions})
    figure = go.Figure()
    for index, reason in enumerate(reasons):
        counts = [run.results.decisions.get(reason, 0) for run in runs.values()]
        totals = [max(sum(run.results.decisions.values()), 1) for run in runs.values()]
        figure.add_bar(
            x=[count / total * 100 for count, total in zip(counts, totals, strict=True)],
            y=list(runs),
            name=reason.replace("_", " "),
            orientation="h",
            marker_color=(*_COLOURS, _GREY)[index % 7],
            customdata=counts,
            hovertemplate="%{y}, %{fullData.name}: %{customdata:,} requests<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title="requests, %")
    return styled(figure, 190 + 40 * len(runs))


def comparison_figure(runs: Runs) -> Any:
    """Goodput and TTFT P90, a bar for each policy."""
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("goodput, req/s", "TTFT P90, s"), horizontal_spacing=0.16
    )
    colours = [colour(index) for index in range(len(runs))]
    columns = (
        [run.results.goodput for run in runs.values()],
        [run.results.time_to_first_token.get("p90", 0.0) / 1e3 for run in runs.values()],
    )
    for column, values in enumerate(columns, 1):
        bars = go.Bar(
            x=list(runs),
            y=values,
            marker_color=colours,
            text=[f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values],
            textposition="outside",
            cliponaxis=False,
            showlegend=False,
        )
        figure.add_trace(bars, row=1, col=column)
        figure.update_yaxes(range=[0, max([*values, 1e-9]) * 1.18], row=1, col=column)
    return styled(figure, 320)


def _legend(y: float) -> dict[str, Any]:
    """Above the plot, where it cannot run into the title of an axis."""
    return {
        "orientation": "h",
        "y": y,
        "yanchor": "bottom",
        "x": 0,
        "xanchor": "left",
        "traceorder": "normal",
    }


def styled(figure: Any, height: int) -> Any:
    """The look that all figures share: see-through, so that the page decides what is behind."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 50, "r": 16, "t": 30, "b": 44},
        font={"family": "system-ui, sans-serif", "size": 13, "color": _GREY},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend=_legend(1.0),
        hoverlabel={"bgcolor": "#1f2328", "font": {"color": "white"}},
    )
    grid = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True}
    figure.update_xaxes(**grid)
    figure.update_yaxes(**grid)
    return figure


_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --back: #ffffff; --line: #d0d7de;
        --faint: #656d76; --shade: #d55e0029; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --back: #0d1117; --line: #30363d; --faint: #9198a1; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
       max-width: 1180px; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin: 0 0 .2em; overflow-wrap: anywhere; }
h2 { font-size: 1.15em; margin: 1.8em 0 .3em; }
h3 { font-size: 1em; margin: 1em 0 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5em 0 1em; }
th, td { text-align: right; padding: .25em .9em; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { color: var(--faint); font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr));
        gap: 0 1.5em; }
.pair > div { min-width: 0; }
.broken { background: var(--shade); padding: .1em .5em; display: inline-block;
          margin: 0 .4em .3em 0; font-size: .9em; }
.foot td { white-space: normal; overflow-wrap: anywhere; text-align: left; }
.foot td:first-child { white-space: nowrap; overflow-wrap: normal; vertical-align: top; }
.foot { font-size: .85em; }
p { margin: .4em 0; } .faint { color: var(--faint); }
@media (max-width: 600px) { body { padding: 0 .6em; } th, td { padding: .25em .5em; } }
"""


def html_report(
    scenario: Scenario,
    runs: Mapping[str, RunFigures],
    origin: Mapping[str, str],
) -> str:
    """The whole report; plotly.js is inside, so the file is about 5 MB.

    Args:
        origin: Where the report comes from: file, command, version.
    """
    results = {name: run.results for name, run in runs.items()}
    setup = scenario.setup
    body = [
        f"<h1>{escape(scenario.title)}</h1>",
        f'<p class="faint">{escape("; ".join((f"seed {scenario.seed}", *scenario.notes)))}</p>',
        html_figure(comparison_figure(runs), first=True) if len(runs) > 1 else "",
        '<div class="wide">',
        html_table(comparison_table(results)),
        "</div><h2>Over time</h2>",
        "".join(f'<span class="broken">{escape(in_words(f))}</span>' for f in setup.failures),
        html_figure(series_figure(runs, setup.failures), first=len(runs) == 1),
        "<h2>What the time to first token is made of</h2>",
        _breakdowns(runs),
        "<h2>Latencies</h2>",
        '<div class="pair"><div>',
        html_figure(cdf_figure(runs, setup.slo, tpot=False)),
        "</div><div>",
        html_figure(cdf_figure(runs, setup.slo, tpot=True)),
        "</div></div><h2>Decisions by reason</h2>",
        html_figure(reasons_figure(runs)),
        "<h2>Where this comes from</h2>",
        _foot(scenario, results, origin),
    ]
    return html_page(scenario.title, _STYLE, body)


def _breakdowns(runs: Mapping[str, RunFigures]) -> str:
    parts = [
        f"<div><h3>{escape(name)}</h3>{html_figure(breakdown_figure(run))}</div>"
        for name, run in runs.items()
    ]
    said = "Mean of all requests, and of those between two percentiles of TTFT."
    return f'<p class="faint">{said}</p><div class="pair">{"".join(parts)}</div>'


def _foot(scenario: Scenario, results: Mapping[str, Results], origin: Mapping[str, str]) -> str:
    rows = [*origin.items(), ("seed", str(scenario.seed))]
    rows += [(f"digest, {name}", found.digest) for name, found in results.items()]
    table = plain_table("", "", "")
    for row in rows:
        table.add_row(*row)
    return html_table(table, css="foot")
