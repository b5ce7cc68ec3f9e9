"""Reading of recorded workloads, whole or in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from itertools import accumulate
from pathlib import Path

import numpy as np

from prfaas.errors import ConfigError
from prfaas.records import without_collections
from prfaas.traces import checks
from prfaas.traces.checks import LIMITS, SPAN_S, DroppedError, Drops, TraceLimits
from prfaas.traces.formats.columns import CSV_FORMATS, LENGTHS, CsvRows
from prfaas.traces.formats.detect import (
    BLOCK_TOKENS,
    CHATS,
    NAME,
    REQUEST_FORMATS,
    SESSIONS,
    MooncakeRows,
    detect,
    looks_like_seconds,
)
from prfaas.traces.lines import OnProgress, read_lines, refuse, text_of
from prfaas.traces.requests import RecordedRequest, Unit
from prfaas.units import NS_PER_S

_DAY_NS = 86_400 * NS_PER_S


@dataclass(frozen=True, slots=True)
class TracePart:
    """A part of a trace; instants count from the earliest request of the file."""

    start_ns: int = 0
    """Earlier requests are left out."""
    duration_ns: int | None = None
    """Length of the part; None is all that is left."""
    num_requests: int | None = None
    """The earliest requests of the part are kept, up to this number; None is all."""

    @property
    def is_whole(self) -> bool:
        """Return True if the part is the whole trace."""
        return not self.start_ns and self.duration_ns is None and self.num_requests is None

    def check(self, since_ns: int) -> None:
        """Check an instant; DroppedError if it is outside."""
        late = self.duration_ns is not None and since_ns >= self.start_ns + self.duration_ns
        if late or since_ns < self.start_ns:
            raise OutsideError


class OutsideError(DroppedError):
    """A request outside the part."""

    def __init__(self) -> None:
        super().__init__("outside the part that was asked for", damaged=False)


@dataclass(slots=True)
class Days:
    """Number of requests and earliest instant of each day of a trace."""

    _counts: dict[int, int] = field(default_factory=dict)
    _earliest_ns: dict[int, int] = field(default_factory=dict)

    def add(self, at_ns: int) -> None:
        """Count a request."""
        day = at_ns // _DAY_NS
        self._counts[day] = self._counts.get(day, 0) + 1
        self._earliest_ns[day] = min(self._earliest_ns.get(day, at_ns), at_ns)

    def earliest_ns(self) -> int | None:
        """Return the earliest instant, or None without requests.

        Days that are further than `checks.SPAN_S` from the median day do not count: their instants
        are damaged.
        """
        half, median = sum(self._counts.values()) / 2, 0
        for day in sorted(self._counts):
            half -= self._counts[day]
            if half <= 0:
                median = day
                break
        span = checks.SPAN_S * NS_PER_S // _DAY_NS
        near = [at for day, at in self._earliest_ns.items() if abs(day - median) <= span]
        return min(near, default=None)


_Parse = Callable[[bytes], RecordedRequest]
_ELSEWHERE = {
    SESSIONS: 'sessions; the simulator reads them with arrivals = "sessions"',
    CHATS: "chat transcripts; make sessions of them: prfaas trace import FILE --out FILE",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """A trace as it was read."""

    rows: tuple[RecordedRequest, ...]
    """In order of arrival; the first one at 0."""
    form: str
    drops: Drops
    """Lines that gave no request."""
    num_unordered: int
    """Requests that the file has after a later one."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(row.num_prompt_tokens for row in self.rows)


@without_collections()
def read_requests(
    path: Path,
    form: str | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    complete: bool = True,
    damaged_max: float = 0.0,
    part: TracePart | None = None,
    on_progress: OnProgress | None = None,
    limits: TraceLimits = LIMITS,
    unit: Unit | None = None,
) -> Reading:
    """Read a trace.

    Args:
        path: The file, gzipped or not.
        form: One of `REQUEST_FORMATS`; None detects it.
        block_tokens: Tokens of a block, of a format with ids of blocks.
        complete: Instants and output lengths are needed; a missing output counts as 1 token.
        damaged_max: Largest share of damaged lines, in [0, 1). With 0 the first one is an error,
            otherwise they are dropped and counted.
        part: The part to keep; None is all. An unordered file is read twice, since the part counts
            from its earliest request.
        on_progress: Called now and then with the bytes of the file that were read.
        limits: On its size and what it holds.
        unit: Unit of timestamps in Mooncake's schema; None is the file's own, ms if it names none.

    Raises:
        ConfigError: The file cannot be read, is in another format, holds no request, is too large,
            too much of it is damaged, or its timestamps are most likely in another unit.
    """
    name = detect(path) if form is None else form
    wanted = part or TracePart()

    def read(first_ns: int | None) -> _Reader:
        lines = read_lines(path, on_progress, limits)
        reader = _Reader(path, damaged_max, wanted, name != LENGTHS.name, first_ns, limits)
        parse = _parser(path, name, lines, block_tokens, complete, unit)
        reader.read(lines, parse)
        reader.has_unit = not isinstance(parse, MooncakeRows) or parse.unit is not None
        return reader

    found = read(None)
    earliest_ns = found.days.earliest_ns()
    if not wanted.is_whole and earliest_ns != found.first_ns:
        found = read(earliest_ns)
    return found.result(name)


def _parser(
    path: Path,
    name: str,
    lines: Iterator[tuple[int, bytes | None]],
    block_tokens: int,
    complete: bool,
    unit: Unit | None,
) -> _Parse:
    if name in _ELSEWHERE:
        raise ConfigError(f"trace {path} holds {_ELSEWHERE[name]}")
    if name not in REQUEST_FORMATS:
        raise ConfigError(f"no format is called {name!r}; there are {', '.join(REQUEST_FORMATS)}")
    if name == NAME:
        return MooncakeRows(block_tokens, complete=complete, unit=unit)
    if unit is not None:
        raise ConfigError(f"trace {path} is in the format {name}, which has a unit of its own")
    if name == LENGTHS.name and complete:
        raise ConfigError(
            f"trace {path} has lengths without instants: enough for a plan, not for a simulation"
        )
    number, header = next(lines, (1, b""))
    csv_format = next(each for each in CSV_FORMATS if each.name == name)
    return CsvRows(csv_format, path, number, header or b"")


@dataclass(slots=True)
class _Reader:
    """Requests of one pass over a file."""

    path: Path
    damaged_max: float
    """Largest share of damaged lines."""
    part: TracePart
    has_instants: bool
    """The format has instants; without, the order of the lines counts."""
    first_ns: int | None
    """Instant from which the part counts; None takes the first request."""
    limits: TraceLimits
    drops: Drops = field(default_factory=Drops)
    days: Days = field(default_factory=Days)
    kept: list[tuple[int, int, RecordedRequest]] = field(default_factory=list)
    num_ids: int = 0
    has_unit: bool = True
    _is_whole: bool = False

    def __post_init__(self) -> None:
        self._is_whole = self.part.is_whole

    def read(self, lines: Iterator[tuple[int, bytes | None]], parse: _Parse) -> None:
        """Keep the requests of all lines."""
        for number, line in lines:
            self.drops.num_lines += 1
            try:
                self._keep(number, parse(line or text_of(line, self.limits)))
            except DroppedError as error:
                self._drop(number, error)
            if not self.has_instants and len(self.kept) == self.part.num_requests:
                break

    def _keep(self, number: int, row: RecordedRequest) -> None:
        if self.first_ns is None:
            self.first_ns = row.at_ns
        if not self._is_whole:
            self.days.add(row.at_ns)
            self.part.check(row.at_ns - self.first_ns)
        # Negative, so that the latest request is the first of a heap.
        entry, limits = (-row.at_ns, -number, row), self.limits
        if self.part.num_requests is None:
            self.kept.append(entry)
            self.num_ids += len(row.block_ids)
        elif len(self.kept) == self.part.num_requests:
            dropped = heappushpop(self.kept, entry)
            self.num_ids += len(row.block_ids) - len(dropped[2].block_ids)
            self._drop(-dropped[1], OutsideError())
        else:
            heappush(self.kept, entry)
            self.num_ids += len(row.block_ids)
        if len(self.kept) > limits.num_requests_max or self.num_ids > limits.num_block_ids_max:
            refuse(
                self.path,
                number,
                f"more than {limits.num_requests_max:,} requests or {limits.num_block_ids_max:,} "
                "ids of blocks; import a part: prfaas trace import with --duration or --requests",
            )

    def _drop(self, number: int, error: DroppedError) -> None:
        if error.damaged and self.damaged_max == 0:
            refuse(
                self.path,
                number,
                f"{error}; prfaas trace import leaves out such lines, up to --damaged-max",
            )
        self.drops.add(number, error)

    def result(self, form: str) -> Reading:
        """The requests in order; ConfigError if too much is damaged, or nothing is left."""
        kept = self._near()
        refuse_if_damaged(self.path, self.drops, self.damaged_max)
        if not kept:
            raise ConfigError(f"trace {self.path} holds no requests{_why(self.drops)}")
        latest = accumulate((row.at_ns for row in kept), max)
        num_unordered = sum(row.at_ns < at_ns for row, at_ns in zip(kept, latest, strict=True))
        kept.sort(key=lambda row: row.at_ns)
        first_ns = kept[0].at_ns
        if not self.has_unit and (why := looks_like_seconds([r.at_ns for r in kept])):
            raise ConfigError(
                f"trace {self.path}: {why}; name their unit: prfaas trace import FILE --out FILE "
                "--timestamps s (or ms)"
            )
        shifted = kept if not first_ns else [r._replace(at_ns=r.at_ns - first_ns) for r in kept]
        return Reading(tuple(shifted), form, self.drops, num_unordered)

    def _near(self) -> list[RecordedRequest]:
        """The requests in order of lines, without those whose instant is far from all others."""
        if not self.kept:
            return []
        self.kept.sort(key=lambda entry: -entry[1])
        rows = [row for _, _, row in self.kept]
        at_s = np.fromiter((row.at_ns / NS_PER_S for row in rows), float, len(rows))
        far = np.abs(at_s - np.median(at_s)) > SPAN_S
        for i in np.flatnonzero(far).tolist():
            detail = f"{abs(at_s[i] - float(np.median(at_s))) / 86_400:,.0f} days from the median"
            days = SPAN_S // 86_400
            reason = f"an instant more than {days} days from the others"
            self._drop(-self.kept[i][1], DroppedError(reason, f"the instant lies {detail}"))
        return [row for row, is_far in zip(rows, far.tolist(), strict=True) if not is_far]


def refuse_if_damaged(path: Path, drops: Drops, damaged_max: float) -> None:
    """Refuse a file of which too much is damaged; ConfigError if the share of damaged lines is
    above `damaged_max`."""
    if drops.damaged_ratio > damaged_max:
        raise ConfigError(
            f"trace {path}: {drops.num_damaged:,} of {drops.num_lines:,} lines are damaged, more "
            f"than {damaged_max:.2%}{_why(drops)}; see whether it is the right format (--from), or "
            "raise --damaged-max"
        )


def _why(drops: Drops) -> str:
    """The most frequent reasons with the first line of each."""
    found = sorted(drops.reasons.values(), key=lambda reason: -reason.count)[:3]
    shown = "".join(f"; line {r.first_line}: {r.first_detail}" for r in found)
    return f" ({drops.num_dropped:,} dropped{shown})" if shown else ""
