"""The report of a run, or a comparison of runs, as tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.presentation import Line, plain_table, plot
from prfaas.sim.engine.failures import in_words
from prfaas.sim.engine.signals import SeriesSample
from prfaas.sim.report.run_figures import RunFigures, comparison_table
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.units import NS_PER_S

Runs = Mapping[str, RunFigures]
_COLUMNS = 120
_SERIES: Mapping[str, Callable[[SeriesSample], float]] = {
    "work before a PD-P instance, s": lambda s: s.local_wait_ns / NS_PER_S,
    "work before a PrfaaS instance, s": lambda s: s.remote_wait_ns / NS_PER_S,
    "link backlog, GB": lambda s: s.link_backlog_bytes / 1e9,
    "requests waiting for decode": lambda s: s.num_decode_waiting,
    "offload threshold, thousand tokens": lambda s: s.offload_threshold / 1e3,
    "PD instances that prefill": lambda s: s.num_prefill,
    "PD instances that decode": lambda s: s.num_decode,
    "PrfaaS instances": lambda s: s.num_prfaas,
}


def print_report(
    scenario: Scenario, runs: Runs, origin: Mapping[str, str], console: Console
) -> None:
    """Write the whole report.

    Args:
        origin: Where the report comes from: command, version.
    """
    console.print(Text(scenario.title, style="bold"))
    console.print(Text("; ".join((f"seed {scenario.seed}", *scenario.notes))))
    for failure in scenario.setup.failures:
        console.print(Text(in_words(failure), style="red"))
    results = {name: run.results for name, run in runs.items()}
    parts: list[Table | Text] = [comparison_table(results), *_over_time(runs)]
    parts += [_parts_of_ttft(name, run) for name, run in runs.items()]
    parts += [_latencies(runs, "TTFT, s"), _latencies(runs, "TPOT, ms"), _decisions(runs)]
    table = plain_table("Where this comes from", "", "")
    table.columns[1].justify, table.columns[1].overflow = "left", "fold"
    for row in (*origin.items(), *((f"digest, {n}", found.digest) for n, found in results.items())):
        table.add_row(*map(Text, row))
    for part in (*parts, table):
        console.print()
        console.print(part)


def _over_time(runs: Runs) -> list[Text]:
    """Egress and queues, a line for each policy; what never changes is left out."""

    def shown(title: str, lines: Iterable[Line]) -> Text:
        return plot(title, "time, s", lines, _COLUMNS)

    egress = [
        (name, run.egress_at_s.tolist(), (run.egress_bits_per_s / 1e9).tolist())
        for name, run in runs.items()
    ]
    plots = [shown("link egress, Gbit/s", egress)]
    for title, value in _SERIES.items():
        lines = [
            (name, [s.at_ns / NS_PER_S for s in run.samples], [value(s) for s in run.samples])
            for name, run in runs.items()
        ]
        if len({y for _, _, values in lines for y in values}) > 1:
            plots.append(shown(title, lines))
    return plots


def _parts_of_ttft(name: str, run: RunFigures) -> Table:
    rows = {"mean": run.results.ttft_parts, **run.results.ttft_parts_by_percentile}
    keys = list(dict.fromkeys(key for parts in rows.values() for key in parts))
    title = f"Parts of the TTFT under {name}, s: mean of all, and between two percentiles"
    table = plain_table(title, "", *(key.replace("_", " ") for key in keys))
    for label, parts in rows.items():
        table.add_row(label, *(f"{parts.get(key, 0.0) / 1e3:.2f}" for key in keys))
    return table


def _latencies(runs: Runs, what: str) -> Text:
    """Share of requests below a time."""
    lines: list[Line] = []
    for name, run in runs.items():
        values = run.ttft_s if what.startswith("TTFT") else run.tpot_ms
        shares = (run.ratios * 100).tolist()[: len(values)]
        lines.append((name, values.tolist(), shares))
    return plot(f"{what}: requests below it, %", what, lines, _COLUMNS)


def _decisions(runs: Runs) -> Table:
    reasons = sorted({reason for run in runs.values() for reason in run.results.decisions})
    table = plain_table("Decisions by reason, share of requests", "", *runs)
    for reason in reasons:
        shares = (
            run.results.decisions.get(reason, 0) / max(sum(run.results.decisions.values()), 1)
            for run in runs.values()
        )
        table.add_row(reason.replace("_", " "), *(f"{share:.1%}" for share in shares))
    return table
