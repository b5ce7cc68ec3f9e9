"""A comparison of runs as one self-contained HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from prfaas.planner.report.html_parts import figure, page, table
from prfaas.sim.engine.failures import in_words
from prfaas.sim.report import figures
from prfaas.sim.report.run_figures import RunFigures
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.scenario_loader import Scenario

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

Row = tuple[str, Callable[[Results], str]]


def html_report(
    scenario: Scenario,
    runs: Mapping[str, RunFigures],
    rows: tuple[Row, ...],
    origin: Mapping[str, str],
) -> str:
    """The whole report; plotly.js is inside, so the file is about 5 MB.

    Args:
        rows: Rows of the table that compares policies.
        origin: Where the report comes from: file, command, version.
    """
    results = {name: run.results for name, run in runs.items()}
    setup = scenario.setup
    body = [
        f"<h1>{escape(scenario.title)}</h1>",
        f'<p class="faint">{escape("; ".join((f"seed {scenario.seed}", *scenario.notes)))}</p>',
        figure(figures.comparison_figure(runs), first=True) if len(runs) > 1 else "",
        '<div class="wide">',
        table(("", *runs), [(label, *map(cell, results.values())) for label, cell in rows]),
        "</div><h2>Over time</h2>",
        "".join(f'<span class="broken">{escape(in_words(f))}</span>' for f in setup.failures),
        figure(figures.series_figure(runs, setup.failures), first=len(runs) == 1),
        "<h2>What the time to first token is made of</h2>",
        _breakdowns(runs),
        "<h2>Latencies</h2>",
        '<div class="pair"><div>',
        figure(figures.cdf_figure(runs, setup.slo, tpot=False)),
        "</div><div>",
        figure(figures.cdf_figure(runs, setup.slo, tpot=True)),
        "</div></div><h2>Decisions by reason</h2>",
        figure(figures.reasons_figure(runs)),
        "<h2>Where this comes from</h2>",
        _foot(scenario, results, origin),
    ]
    return page(scenario.title, _STYLE, body)


def _breakdowns(runs: Mapping[str, RunFigures]) -> str:
    parts = [
        f"<div><h3>{escape(name)}</h3>{figure(figures.breakdown_figure(run))}</div>"
        for name, run in runs.items()
    ]
    said = "Mean of all requests, and of those between two percentiles of TTFT."
    return f'<p class="faint">{said}</p><div class="pair">{"".join(parts)}</div>'


def _foot(scenario: Scenario, results: Mapping[str, Results], origin: Mapping[str, str]) -> str:
    rows = [*origin.items(), ("seed", str(scenario.seed))]
    rows += [(f"digest, {name}", found.digest) for name, found in results.items()]
    return table(("", ""), rows, css="foot")
