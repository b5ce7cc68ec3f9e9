"""Actions of `prfaas trace`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import click
from rich.table import Table

from prfaas.cli.common.reading_progress import reading
from prfaas.errors import ConfigError
from prfaas.presentation import console_for
from prfaas.traces.checks import Drops
from prfaas.traces.figures import LoadFigures, Spread, TraceFigures, figures_of
from prfaas.traces.formats.columns import LENGTHS
from prfaas.traces.formats.detect import BLOCK_TOKENS, CHATS, SESSIONS, detect, mooncake_line
from prfaas.traces.reader import TracePart, read_requests
from prfaas.traces.requests import Unit
from prfaas.traces.sessions.block_chain import TextUnits, characters, tokens_of
from prfaas.traces.sessions.chats import read_chats
from prfaas.traces.sessions.session_file import (
    block_tokens_of,
    check_target,
    flattened,
    read_sessions,
    session_lines,
    write_lines,
)
from prfaas.units import NS_PER_S

_CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class Imported:
    """Results of an import."""

    form: str
    num_requests: int
    """Requests that were written."""
    num_sessions: int | None
    """Sessions; None for requests without."""
    drops: Drops
    notes: dict[str, int]
    """Numbers of other omissions, assumptions and changes."""
    measure: str = ""
    """Unit of lengths of chats; empty for others."""


@dataclass(frozen=True, slots=True)
class Import:
    """An import, as its options describe it."""

    file: Path
    out: Path
    form: str | None
    part: TracePart
    block_tokens: int
    damaged_max: float
    tokenizer: Path | None
    chars_per_token: float | None
    pause_ns: int
    overwrite: bool = False
    unit: Unit | None = None

    def run(self, *, as_json: bool) -> None:
        """Read, write, and print the omissions; ConfigError if the source or the target is not as
        it should be."""
        check_target(self.out, self.file, overwrite=self.overwrite)
        form = detect(self.file) if self.form is None else self.form
        if form == SESSIONS:
            raise ConfigError(f"{self.file} holds sessions already; they need no import")
        done = self._chats() if form == CHATS else self._requests(form)
        if as_json:
            click.echo(json.dumps(asdict(done) | {"out": str(self.out)}, indent=2))
            return
        for line in _lines(done, self.file, self.out):
            click.echo(line)

    def _requests(self, form: str) -> Imported:
        if self.tokenizer is not None or self.chars_per_token is not None:
            raise ConfigError(
                f"{self.file} has lengths; --tokenizer and --chars-per-token are for chats"
            )
        with reading(self.file) as on_progress:
            found = read_requests(
                self.file,
                form,
                block_tokens=self.block_tokens,
                damaged_max=self.damaged_max,
                part=self.part,
                on_progress=on_progress,
                unit=self.unit,
            )
        first, *others = found.rows
        write_lines(self.out, chain([mooncake_line(first, "ms")], map(mooncake_line, others)))
        notes = {"requests that were not in order, and were sorted": found.num_unordered}
        if any(row.block_ids for row in found.rows):
            notes["requests without hash_ids"] = sum(not row.block_ids for row in found.rows)
        return Imported(form, len(found.rows), None, found.drops, notes)

    def _chats(self) -> Imported:
        if self.part.start_ns or self.part.duration_ns is not None:
            raise ConfigError("--start and --duration are for requests; chats become sessions")
        units = self._units()
        with reading(self.file) as on_progress:
            chats = read_chats(
                self.file,
                units,
                damaged_max=self.damaged_max,
                num_requests=self.part.num_requests,
                on_progress=on_progress,
            )
        write_lines(self.out, session_lines(chats, self.pause_ns / NS_PER_S))
        num_sessions = len(chats.sessions)
        notes = dict(chats.notes)
        return Imported(CHATS, chats.num_requests, num_sessions, chats.drops, notes, units.title)

    def _units(self) -> TextUnits:
        if self.tokenizer is not None:
            return tokens_of(self.tokenizer)
        return characters(self.chars_per_token or _CHARS_PER_TOKEN)


def _lines(done: Imported, file: Path, out: Path) -> list[str]:
    sessions = "" if done.num_sessions is None else f" in {done.num_sessions:,} sessions"
    lines = [
        f"{out}: {done.num_requests:,} requests{sessions}",
        f"{file}: {done.form}, {done.drops.num_lines:,} lines, {done.drops.num_dropped:,} dropped",
    ]
    if done.measure:
        lines.append(f"lengths: {done.measure}")
    for reason, each in done.drops.reasons.items():
        kind = "damaged" if each.damaged else "left out"
        lines.append(f"  {each.count:,} {kind}: {reason}")
        if each.damaged:
            lines.append(f"    line {each.first_line}: {each.first_detail}")
    lines += [f"  {count:,} {what}" for what, count in done.notes.items() if count]
    return lines


_COLUMNS = 100  # of output that goes to a file or a pipe
_BARS = "▁▂▃▄▅▆▇█"


def show_trace(path: Path, block_tokens: int, *, as_json: bool) -> None:
    """Print the figures of a trace; ConfigError if it cannot be read."""
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
