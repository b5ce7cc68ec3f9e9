"""Days as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import numpy as np

from .outcome import WRONG, Outcome, Run, Settings

NUM_PARTS = 8
"""Of a day, for the table by time."""


def tables(runs: Sequence[Run], settings: Settings) -> str:
    """All tables."""
    found = [_whole(runs, settings), _by_time(runs, settings), _changes(runs), _machine(runs)]
    return "\n\n".join(found)


def is_good(outcome: Outcome, settings: Settings) -> bool:
    """Return True if a request was answered within both targets."""
    in_time = outcome.ttft <= settings.ttft_s and outcome.tpot <= settings.tpot_s
    return in_time and not outcome.error


def _whole(runs: Sequence[Run], settings: Settings) -> str:
    lines = [
        f"| | re-roling | answered, req/s | within {settings.ttft_s:g} s and "
        f"{settings.tpot_s * 1e3:g} ms, req/s | share | TTFT P50, s | P90 | P99 "
        "| TPOT P50, ms | P99 | offloaded | role changes | errors | wrong answers |",
        "|---|---|" + "---:|" * 12,
    ]
    for run in runs:
        done = [o for o in run.outcomes if o.ended is not None and not o.error]
        good = sum(is_good(o, settings) for o in run.outcomes)
        ttft = np.percentile([o.ttft for o in run.outcomes], [50, 90, 99])
        tpot = np.percentile([o.tpot for o in run.outcomes], [50, 99]) * 1e3
        last = max(o.ended or 0.0 for o in run.outcomes)
        cells = [run.where, "on" if run.reroling else "off", f"{len(done) / last:.2f}"]
        cells += [f"{good / settings.day_s:.2f}", f"{good / len(run.outcomes):.1%}"]
        cells += [f"{value:.2f}" for value in ttft] + [f"{value:.1f}" for value in tpot]
        cells += [f"{sum(o.remote for o in run.outcomes) / len(run.outcomes):.1%}"]
        errors = [o.error for o in run.outcomes if o.error]
        cells += [str(len(run.changes)), str(len(errors)), str(errors.count(WRONG))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_time(runs: Sequence[Run], settings: Settings) -> str:
    """Share of the requests within both targets, by when they came."""
    span = settings.day_s / NUM_PARTS
    heads = [f"{i * span:g}-{(i + 1) * span:g} s" for i in range(NUM_PARTS)]
    lines = ["| in time, of those that came at | " + " | ".join(heads) + " |"]
    lines.append("|---|" + "---:|" * NUM_PARTS)
    for run in runs:
        cells = [f"{run.where}, re-roling {'on' if run.reroling else 'off'}"]
        for i in range(NUM_PARTS):
            came = [o for o in run.outcomes if i * span <= o.arrived < (i + 1) * span]
            good = sum(is_good(o, settings) for o in came)
            cells.append(f"{good / max(len(came), 1):.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _changes(runs: Sequence[Run]) -> str:
    lines = ["| role changes | begun at, s | to | drained in, s | requests finished meanwhile |"]
    lines.append("|---|---:|---|---:|---:|")
    for run in runs:
        for change in run.changes:
            left = "" if change.num_left is None else str(change.num_left)
            drained = "not any more" if isnan(change.drained_s) else f"{change.drained_s:.1f}"
            cells = [run.where, f"{change.at:.1f}", change.to, drained, left]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _machine(runs: Sequence[Run]) -> str:
    """Figures that show if the machine was the bottleneck, and errors."""
    lines = []
    for run in runs:
        lines += [f"{run.where}, {name}: {value:.3g}" for name, value in run.facts.items()]
        lines += [f"error: {error}" for error in sorted({o.error for o in run.outcomes} - {""})]
    return "\n".join(lines)
