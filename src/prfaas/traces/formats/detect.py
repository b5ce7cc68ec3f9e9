"""Formats of traces: which one a file has, and Mooncake's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from prfaas.errors import ConfigError
from prfaas.traces import checks
from prfaas.traces.checks import (
    DroppedError,
    check_output,
    check_prompt,
    decode,
    in_range,
    shown_name,
)
from prfaas.traces.formats.columns import CSV_FORMATS, columns_of
from prfaas.traces.lines import read_lines
from prfaas.traces.requests import BlockIds, MooncakeLine, RecordedRequest, Unit
from prfaas.units import NS_PER_MS, NS_PER_S

_NS: dict[Unit, int] = {"s": NS_PER_S, "ms": NS_PER_MS}
_AT_MAX = {unit: checks.INSTANT_S_MAX * NS_PER_S / ns for unit, ns in _NS.items()}
_SINCE_1970_S = (10**9, 10**10)
# A trace this short and dense is most likely one in seconds.
_SHORT_NS = 60 * NS_PER_S
_DENSE_PER_S = 10.0
_NUM_WHOLE_MIN = 10
_WHOLE_SHORT_NS = 10 * NS_PER_S
_WHOLE_DENSE_PER_S = 50.0
NAME = "mooncake"
TITLE = "Mooncake's schema"
BLOCK_TOKENS = 512


class MooncakeRows:
    """Rows of a file in Mooncake's schema.

    Args:
        block_tokens: Tokens of a block; where ids are given, every block of a prompt has its own.
        complete: Instants and output lengths are needed.
        unit: Unit of the timestamps; None takes that of the first line, else ms.
    """

    def __init__(
        self, block_tokens: int = BLOCK_TOKENS, *, complete: bool = True, unit: Unit | None = None
    ) -> None:
        self._block_tokens, self._complete = block_tokens, complete
        self.unit = unit
        self._decoder = msgspec.json.Decoder(MooncakeLine)
        self._known: dict[int, int] = {}

    def __call__(self, line: bytes) -> RecordedRequest:
        """The request of a line; DroppedError if the line has no request."""
        try:
            row = decode(self._decoder, line)
        except DroppedError:
            _check_range(line)
            raise
        at, length, output, ids = row.timestamp, row.input_length, row.output_length, row.hash_ids
        if at is None or output is None:
            if self._complete:
                missing = "timestamp" if at is None else "output_length"
                raise DroppedError(f"{missing} is missing")
            at, output = at or 0, output or 0
        if self.unit is None:
            self.unit = row.timestamp_unit
        unit = self.unit or "ms"
        # Nearly all lines are well: so one look is enough, and only others are asked why.
        if not (
            0 <= at <= _AT_MAX[unit]
            and 1 <= length <= checks.NUM_PROMPT_TOKENS_MAX
            and 0 <= output <= checks.NUM_OUTPUT_TOKENS_MAX
            and len(row.tenant) <= checks.TENANT_CHARS_MAX
        ):
            _refuse(row, at, output, unit)
        if ids:
            self._check_ids(row)
        # The same int object for the same id: prompts share the memory as the blocks.
        shared = tuple(map(self._known.setdefault, ids, ids))
        return RecordedRequest(round(at * _NS[unit]), length, output or 1, shared, row.tenant)

    def _check_ids(self, row: MooncakeLine) -> None:
        num_blocks = -(-row.input_length // self._block_tokens)
        if len(row.hash_ids) != num_blocks:
            raise DroppedError(
                f"hash_ids are not the prompt's blocks of {self._block_tokens:,} tokens",
                f"{len(row.hash_ids):,} hash_ids for {row.input_length:,} prompt tokens, which are "
                f"{num_blocks:,} blocks of {self._block_tokens:,}; name every block or none, or "
                "set the tokens of the trace's blocks: cache.block_tokens, or --block-tokens",
            )


def _check_range(line: bytes) -> None:
    """Drop a line with an id of a block that is out of range; DroppedError names it."""
    try:
        found = msgspec.json.decode(line, type=BlockIds).hash_ids
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for block in found:
        in_range("an id of hash_ids", block, 0, checks.BLOCK_ID_MAX)


def _refuse(row: MooncakeLine, at: float, output: int, unit: Unit) -> None:
    """Drop a line of which a number or the tenant is out of range; DroppedError says which."""
    in_range("timestamp", at, 0, _AT_MAX[unit], unit)
    check_prompt("input_length", row.input_length)
    check_output("output_length", output)
    raise DroppedError(
        "tenant is too long",
        f"tenant has {len(row.tenant):,} characters; at most {checks.TENANT_CHARS_MAX}",
    )


def looks_like_seconds(at_ns: Sequence[int]) -> str:
    """The reason why timestamps that were read as ms are most likely seconds; empty if none.

    Args:
        at_ns: Instants of the requests in order, read as ms.
    """
    first_ms = at_ns[0] / NS_PER_MS
    if _SINCE_1970_S[0] <= first_ms < _SINCE_1970_S[1]:
        return f"timestamp {first_ms:.0f} is a time since 1970 in seconds, and 20 days in ms"
    span_ns = at_ns[-1] - at_ns[0]
    rate_per_s = (len(at_ns) - 1) / span_ns * NS_PER_S if span_ns else 0.0
    load = f"{rate_per_s:,.3g} req/s for {span_ns / NS_PER_S:.3g} s"
    if any(at % NS_PER_MS for at in at_ns):
        if span_ns < _SHORT_NS and rate_per_s > _DENSE_PER_S:
            return f"timestamps have decimals, and in ms they are {load}"
    elif (
        len(at_ns) >= _NUM_WHOLE_MIN
        and span_ns < _WHOLE_SHORT_NS
        and rate_per_s > _WHOLE_DENSE_PER_S
    ):
        return f"in ms the timestamps are {load}"
    return ""


def mooncake_line(row: RecordedRequest, unit: Unit | None = None) -> MooncakeLine:
    """The line that a request is written as, in ms; with `unit` it names that unit."""
    at_ms = row.at_ns / NS_PER_MS
    return MooncakeLine(
        timestamp=int(at_ms) if at_ms.is_integer() else at_ms,
        timestamp_unit=unit,
        input_length=row.num_prompt_tokens,
        output_length=row.num_output_tokens,
        hash_ids=list(row.block_ids),
        tenant=row.tenant,
    )


SESSIONS = "sessions"
CHATS = "chats"
REQUEST_FORMATS = (NAME, *(form.name for form in CSV_FORMATS))
"""Formats of requests that come at instants of their own."""
_NUM_LINES = 20
_MARKS = (
    (NAME, {"input_length"}),
    (SESSIONS, {"block_size", "requests"}),
    (CHATS, {"messages"}),
    (CHATS, {"conversations"}),
    (CHATS, {"conversation"}),
    (CHATS, {"message"}),
    (CHATS, {"role", "content"}),
)
"""Formats of JSON lines by fields that only they have."""


def detect(path: Path) -> str:
    """The name of a file's format.

    Raises:
        ConfigError: The file cannot be read, is empty, or is in no known format.
    """
    found: list[str] = []
    for number, line in islice(read_lines(path), _NUM_LINES):
        if line is None or line.startswith(b"{"):
            fields = _fields(line or b"")
            for name, marks in _MARKS:
                if marks <= fields:
                    return name
            found.append(f"line {number} with the fields {_shown(sorted(fields))}")
        elif line.startswith(b"[") and not found:
            raise ConfigError(
                f"trace {path}: a JSON array; expected one object a line: jq -c '.[]' FILE"
            )
        else:
            columns = columns_of(line)
            if not found and (table := _table(path, columns)):
                return table
            # It may be a damaged line before lines of JSON.
            found.append(f"line {number} with the columns {_shown(columns)}")
    if not found:
        raise ConfigError(f"trace {path} holds no requests: the file is empty")
    raise _unknown(path, found[0])


def _shown(names: list[str]) -> str:
    return ", ".join(map(shown_name, names[:8])) or "(none)"


def _fields(line: bytes) -> set[str]:
    try:
        return set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()


def _table(path: Path, columns: list[str]) -> str | None:
    for form in CSV_FORMATS:
        if form.matches(columns):
            return form.name
    if "rate_rps" in columns:
        raise ConfigError(
            f"trace {path} holds rates over time and no requests; a simulation follows them with "
            'arrivals = "diurnal", curve and curve_model'
        )
    return None


def _unknown(path: Path, found: str) -> ConfigError:
    known = "; ".join(
        f"{form.name}: {', '.join(n for n in (form.instant, form.prompt[0]) if n)}"
        for form in CSV_FORMATS
    )
    return ConfigError(
        f"trace {path}: {found[:400]}; expected JSON lines with input_length (mooncake), "
        "block_size and requests (sessions) or messages (chats), or a table with a header "
        f"({known})"
    )
