"""Data of runs for the console's replay, and their report as tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.presentation import Line, plain_table, plot
from prfaas.sim.engine.failures import in_words
from prfaas.sim.engine.signals import SeriesSample
from prfaas.sim.results.columns import FinishedRequests, columns_of, have_finished
from prfaas.sim.results.summary import Results, window_bytes
from prfaas.sim.scenario.run import ScenarioRun
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.units import BITS_PER_BYTE, NS_PER_MS, NS_PER_S

NUM_POINTS_MAX = 400
_RATIOS = np.concatenate([np.linspace(0, 0.99, 200), np.linspace(0.99, 1, 51)[1:]])


@dataclass(frozen=True)
class RunFigures:
    """One run."""

    results: Results
    samples: list[SeriesSample]
    egress_at_s: FloatArray
    """Middle of each span of the egress, s."""
    egress_bits_per_s: FloatArray
    """Mean egress of each span."""
    ttft_s: FloatArray
    """TTFT at each of `ratios`, s."""
    tpot_ms: FloatArray
    """TPOT at each of `ratios`, ms."""
    ratios: FloatArray
    """Shares of the requests, in [0, 1]."""


def figures_of(run: ScenarioRun) -> RunFigures:
    """Take from a run what the report draws."""
    scenario, sim = run.scenario, run.simulation
    end_ns = scenario.end_ns or sim.clock.now_ns + 1
    columns = columns_of(sim.requests)
    came = columns["arrived_at_ns"]
    is_in_window = (scenario.start_ns <= came) & (came < end_ns)
    done = FinishedRequests(columns.chosen(have_finished(sim.requests) & is_in_window))
    at_s, egress = _egress(window_bytes(sim.links), sim.clock.now_ns)
    return RunFigures(
        run.results,
        _thinned(sim.series.samples),
        at_s,
        egress,
        _quantiles(done.ttft_ns / NS_PER_S),
        _quantiles(done.tpot_ns[done.has_steps] / NS_PER_MS),
        _RATIOS,
    )


def _quantiles(values: FloatArray) -> FloatArray:
    return np.asarray(np.quantile(values, _RATIOS) if len(values) else values, np.float64)


def _egress(window_bytes: dict[int, float], now_ns: int) -> tuple[FloatArray, FloatArray]:
    """Mean of the one-second windows over spans that are as long as the drawing asks for."""
    count = now_ns // NS_PER_S + 1
    sent = np.zeros(count)
    for window, num_bytes in window_bytes.items():
        if window < count:
            sent[window] = num_bytes
    span = -(-count // NUM_POINTS_MAX)
    starts = np.arange(0, count, span)
    lengths = np.minimum(starts + span, count) - starts
    means = np.add.reduceat(sent, starts) / lengths * BITS_PER_BYTE
    return starts + lengths / 2, means


def _thinned(samples: list[SeriesSample]) -> list[SeriesSample]:
    step = -(-len(samples) // NUM_POINTS_MAX) if samples else 1
    return samples[::step]


KIND = "prfaas-series"
_COLUMNS: Mapping[str, Callable[[SeriesSample], float]] = {
    "link capacity, bit/s": lambda s: s.link_bits_per_s,
    "link backlog, bytes": lambda s: s.link_backlog_bytes,
    "transfers": lambda s: s.num_flows,
    "work before a PD-P instance, ms": lambda s: s.local_wait_ns / 1e6,
    "work before a PrfaaS instance, ms": lambda s: s.remote_wait_ns / 1e6,
    "offload threshold, tokens": lambda s: s.offload_threshold,
    "requests waiting for decode": lambda s: s.num_decode_waiting,
    "requests decoding": lambda s: s.num_decode_running,
    "PD instances that prefill": lambda s: s.num_prefill,
    "PD instances that decode": lambda s: s.num_decode,
    "PrfaaS instances": lambda s: s.num_prfaas,
}


def series_of(title: str, runs: Mapping[str, RunFigures]) -> dict[str, Any]:
    """JSON values: for each policy the instants, s, and named columns of the same length."""
    return {
        "kind": KIND,
        "title": title,
        "runs": {policy: _run(figures) for policy, figures in runs.items()},
    }


def _run(figures: RunFigures) -> dict[str, Any]:
    at_s = np.array([sample.at_ns / NS_PER_S for sample in figures.samples])
    egress = np.interp(at_s, figures.egress_at_s, figures.egress_bits_per_s)
    columns: dict[str, list[float]] = {
        "link egress, bit/s": [round(float(rate)) for rate in egress]
    }
    columns |= {
        name: [round(value(sample), 3) for sample in figures.samples]
        for name, value in _COLUMNS.items()
    }
    return {"at_s": at_s.round(3).tolist(), "columns": columns}


def _seconds(spread: Mapping[str, float], key: str) -> str:
    return f"{spread[key] / 1e3:.2f} s" if key in spread else "-"


def _ttft(results: Results, key: str) -> str:
    return _seconds(results.time_to_first_token, key)


def _queue(results: Results, name: str, scale: float) -> str:
    found = results.queues[name]
    return f"{found['avg'] / scale:.2f} / {found['p99'] / scale:.2f}" if found else "-"


def _sent(results: Results, purpose: str) -> float:
    """GB for a purpose, over all links."""
    return sum(link["bytes"][purpose] for link in results.traffic.values()) / 1e9


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in found.items()) or "-"


_SHOWN_OF_TTFT = (
    ("mean", "avg"),
    ("P50", "p50"),
    ("P90", "p90"),
    ("P99", "p99"),
    ("longest", "max"),
)
ROWS: tuple[tuple[str, Callable[[Results], str]], ...] = (
    ("requests", lambda r: f"{r.num_requests:,}"),
    ("finished", lambda r: f"{r.outcomes.get('finished', 0):,}"),
    ("rejected", lambda r: f"{r.outcomes.get('rejected', 0):,}"),
    ("failed", lambda r: f"{r.outcomes.get('failed', 0):,}"),
    ("goodput", lambda r: f"{r.goodput:.3f} req/s"),
    ("SLO attainment", lambda r: f"{r.slo_attainment:.1%}"),
    *((f"TTFT {name}", partial(_ttft, key=key)) for name, key in _SHOWN_OF_TTFT),
    ("TPOT mean", lambda r: f"{r.inter_token_latency.get('avg', 0):.1f} ms"),
    ("TPOT P99", lambda r: f"{r.inter_token_latency.get('p99', 0):.1f} ms"),
    ("E2E P90", lambda r: _seconds(r.request_latency, "p90")),
    ("offloaded", lambda r: f"{r.offloaded_ratio:.1%}"),
    ("prefix hits", lambda r: f"{r.prefix_hit_ratio:.1%}"),
    ("egress mean", lambda r: f"{r.egress['avg_bits_per_s'] / 1e9:.2f} Gbit/s"),
    ("egress P99 of 1 s", lambda r: f"{r.egress['p99_bits_per_s'] / 1e9:.2f} Gbit/s"),
    ("PD-P busy", lambda r: f"{r.utilisation['pd_prefill']:.1%}"),
    ("PrfaaS busy", lambda r: f"{r.utilisation['prfaas_prefill']:.1%}"),
    ("link busy", lambda r: f"{r.utilisation['link']:.1%}"),
    ("decode slots", lambda r: f"{r.utilisation['decode_slots']:.1%}"),
    ("PD-P queue mean / P99, s", lambda r: _queue(r, "pd_prefill_ms", 1e3)),
    ("PrfaaS queue mean / P99, s", lambda r: _queue(r, "prfaas_prefill_ms", 1e3)),
    ("link backlog mean / P99, GB", lambda r: _queue(r, "link_bytes", 1e9)),
    ("decode queue mean / P99", lambda r: _queue(r, "decode_requests", 1)),
    ("pulled, copied, GB", lambda r: f"{_sent(r, 'pull'):.1f}, {_sent(r, 'copy'):.1f}"),
    ("recomputed", lambda r: f"{r.num_recomputed:,}"),
    ("routes left, by reason", lambda r: _counts(r.fallbacks)),
    ("retries", lambda r: _counts(r.retries)),
    ("breakers opened", lambda r: _counts(r.breakers_opened)),
    ("cost of traffic", lambda r: f"{r.price['traffic']:.2f}"),
    ("cost of prefills by use", lambda r: f"{r.price['prefills']:.2f}"),
    ("cost of a request in time", lambda r: f"{r.price['per_request_in_time']:.5f}"),
    ("cost of a million prompt tokens", lambda r: f"{r.price['per_million_prompt_tokens']:.3f}"),
)


def comparison_table(found: Mapping[str, Results]) -> Table:
    """A column for each policy."""
    table = Table("", *found, box=None, padding=(0, 2))
    for label, cell in ROWS:
        table.add_row(label, *(cell(results) for results in found.values()))
    return table


Runs = Mapping[str, RunFigures]
_PLOT_COLUMNS = 120


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
        return plot(title, "time, s", lines, _PLOT_COLUMNS)

    egress = [
        (name, run.egress_at_s.tolist(), (run.egress_bits_per_s / 1e9).tolist())
        for name, run in runs.items()
    ]
    plots = [shown("link egress, Gbit/s", egress)]
    for title, value in _COLUMNS.items():
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
    return plot(f"{what}: requests below it, %", what, lines, _PLOT_COLUMNS)


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
