"""`prfaas trace show`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from prfaas.cli.common.console import console_for
from prfaas.cli.common.reading_progress import reading
from prfaas.traces.figures import LoadFigures, Spread, TraceFigures, figures_of
from prfaas.traces.formats.columns import LENGTHS
from prfaas.traces.formats.detect import SESSIONS, detect
from prfaas.traces.formats.mooncake import BLOCK_TOKENS
from prfaas.traces.reader import read_requests
from prfaas.traces.sessions.flatten import block_tokens_of, flattened
from prfaas.traces.sessions.session_file import read_sessions

_COLUMNS = 100  # of output that goes to a file or a pipe
_BARS = "▁▂▃▄▅▆▇█"


def show_trace(path: Path, block_tokens: int, *, as_json: bool) -> None:
    """Print the figures of a trace.

    Raises:
        ConfigError: It cannot be read.
    """
    form = detect(path)
    with reading(path) as on_progress:
        if form == SESSIONS:
            sessions = read_sessions(path, on_progress)
            block_tokens = block_tokens_of(sessions, BLOCK_TOKENS)
            found = figures_of(flattened(sessions, block_tokens), block_tokens, sessions)
        else:
            timed = form != LENGTHS.name
            rows = read_requests(
                path, form, block_tokens=block_tokens, complete=timed, on_progress=on_progress
            ).rows
            found = figures_of(rows, block_tokens)
    if as_json:
        click.echo(json.dumps({"format": form, **asdict(found)}, indent=2))
        return
    _print(path, form, found, block_tokens)


def _print(path: Path, form: str, found: TraceFigures, block_tokens: int) -> None:
    out = console_for(_COLUMNS)
    sessions = found.sessions
    what = f"{found.num_requests:,} requests"
    if sessions is not None:
        what += f" in {sessions.num_sessions:,} sessions"
    out.print(f"{path}: {form}, {what}", markup=False, soft_wrap=True)
    table = Table("", "mean", "P50", "P90", "P99", "max", box=None, padding=(0, 2))
    for column in table.columns[1:]:
        column.justify = "right"
    _add(table, "prompt, tokens", found.prompt_tokens)
    _add(table, "output, tokens", found.output_tokens)
    if found.num_with_ids:
        _add(table, "new after prefix hits, tokens", found.new_tokens)
    if sessions is not None:
        _add(table, "requests of a session", sessions.turns)
        _add(table, "pause before a turn, s", sessions.pause_s)
    out.print(table)
    for line in (*_prefix_lines(found, block_tokens), *_load_lines(found.load)):
        out.print(line, markup=False, soft_wrap=True)


def _add(table: Table, name: str, spread: Spread | None) -> None:
    if spread is not None:
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        table.add_row(
            name, *(f"{value:,.1f}" if value < 10 else f"{value:,.0f}" for value in values)
        )


def _prefix_lines(found: TraceFigures, block_tokens: int) -> list[str]:
    if not found.num_with_ids:
        return ["common prefixes: unknown, since the trace names no blocks"]
    known = found.num_with_ids / found.num_requests
    of = "" if known == 1 else f"; {known:.1%} of the requests name their blocks"
    return [
        f"common prefixes: {found.prefix_hit_ratio:.1%} of the prompt tokens, in blocks of "
        f"{block_tokens} tokens that an unlimited cache keeps{of}"
    ]


def _load_lines(load: LoadFigures | None) -> list[str]:
    if load is None:
        return ["starts of sessions are not recorded: set workload.rate or workload.users"]
    if not load.span_s:
        return ["all requests arrive at the same time, or times are not recorded"]
    peak = (
        ""
        if load.peak_ratio is None or load.peak_ratio < 1
        else f", fullest minute {load.peak_ratio:.1f} times as much"
    )
    span = f"{load.span_s:,.0f}" if load.span_s >= 10 else f"{load.span_s:.3g}"
    lines = [
        f"arrivals: {load.rate_per_s:,.3g} req/s over {span} s{peak}; "
        f"variation of gaps {load.gap_cv:.2f} (Poisson: 1)",
        _bars(load.arrivals),
    ]
    if load.tick_s is not None:
        lines.append(
            f"instants come in ticks of {load.tick_s:g} s, each a burst; spread them with "
            f'workload.jitter = "{load.tick_s:g}s"'
        )
    return lines


def _bars(counts: Sequence[int]) -> str:
    top = max(counts)
    return "".join(
        _BARS[min(count * len(_BARS) // (top + 1), len(_BARS) - 1)] if count else " "
        for count in counts
    )
