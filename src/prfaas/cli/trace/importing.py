"""`prfaas trace import`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import click

from prfaas.cli.common.reading_progress import reading
from prfaas.errors import ConfigError
from prfaas.traces.drops import Drops
from prfaas.traces.formats.detect import CHATS, SESSIONS, detect
from prfaas.traces.formats.mooncake import Unit, mooncake_line
from prfaas.traces.part import TracePart
from prfaas.traces.reader import read_requests
from prfaas.traces.sessions.chats import read_chats
from prfaas.traces.sessions.session_writer import session_lines
from prfaas.traces.sessions.text_units import TextUnits, characters, tokens_of
from prfaas.traces.writer import check_target, write_lines
from prfaas.units import NS_PER_S

_CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class Imported:
    """Results of an import.

    Attributes:
        num_requests: Requests that were written.
        num_sessions: Sessions; None for requests without.
        notes: Numbers of other omissions, assumptions and changes.
        measure: Unit of lengths of chats; empty for others.
    """

    form: str
    num_requests: int
    num_sessions: int | None
    drops: Drops
    notes: dict[str, int]
    measure: str = ""


@dataclass(frozen=True, slots=True, kw_only=False)
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
        """Read, write, and print the omissions.

        Raises:
            ConfigError: The source or the target is not as it should be.
        """
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
