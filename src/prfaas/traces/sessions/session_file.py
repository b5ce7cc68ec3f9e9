"""A file of recorded agent sessions, and its requests one by one.

A line is a session; it has runs of block ids instead of all ids.

The form is that of kv-cache-tester's traces of Claude Code, run-length encoded:

    {"id": ..., "block_size": 64, "requests": [
        {"in": prompt tokens, "out": output tokens, "h": [[first id, run length], ...],
         "t": s since the start, "api": s until the answer, "think": s from the answer before},
        {"t": ..., "sub": [requests of a sub-agent]}]}

Ids are the session's own, but for those in the runs of `shared`: they are the file's, and sessions
that have them share these blocks. `start` is when the session began, s since the first one. A line
with `dup_of` repeats another session and is left out.
"""

from __future__ import annotations

import gzip
import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import cast

import msgspec

from prfaas.errors import ConfigError
from prfaas.traces import checks
from prfaas.traces.checks import (
    NUM_SESSIONS_MAX,
    NUM_TURNS_MAX,
    DroppedError,
    check_output,
    check_prompt,
    decode,
    in_range,
)
from prfaas.traces.formats.detect import SESSIONS, detect
from prfaas.traces.lines import OnProgress, read_lines, refuse, text_of
from prfaas.traces.requests import RecordedRequest
from prfaas.traces.sessions.block_chain import (
    BLOCK_TOKENS,
    BlockNumbers,
    Regroup,
    Runs,
    SharedNames,
)
from prfaas.traces.sessions.chats import UNTIMED, Chats, ChatTurn
from prfaas.units import NS_PER_S


class _Request(msgspec.Struct):
    t: float
    input_tokens: int | None = msgspec.field(default=None, name="in")
    out: int | None = None
    h: list[tuple[int, int]] = []
    api: float | None = None
    think: float | None = None
    sub: list[_Request] | None = None


class _Session(msgspec.Struct):
    block_size: int
    requests: list[_Request] = []
    dup_of: str | None = None
    shared: list[tuple[int, int]] = []
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    num_prompt_tokens: int
    num_output_tokens: int
    runs: Runs
    """First id and length of each run of block ids; the last block may be a partial one."""
    think_s: float
    """From the end of the request before, of the agent that starts it, s."""
    after: int | None
    """Index of the turn it waits for; None for the first."""
    at_s: float = 0.0
    """Time when it came, s since the start of the session."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, each after the one it waits for."""

    turns: tuple[Turn, ...]
    """In an order in which each comes after the one it waits for."""
    block_tokens: int
    shared: Runs = ()
    """Runs of ids of blocks that other sessions of the file have too, rising."""
    start_s: float | None = None
    """Time when it began, s since the first session of the file; None if unknown."""


def read_sessions(path: Path, on_progress: OnProgress | None = None) -> tuple[Session, ...]:
    """The sessions of a file that have a turn; ConfigError if the file or a line of it is wrong.

    Args:
        path: The file, gzipped or not.
        on_progress: Called now and then with the bytes of the file that were read.
    """
    decoder = msgspec.json.Decoder(_Session)
    found: list[Session] = []
    for number, line in read_lines(path, on_progress):
        try:
            session = _session(decode(decoder, text_of(line)))
        except DroppedError as error:
            _refuse_other(path)
            refuse(path, number, str(error))
        if session is not None:
            found.append(session)
        if len(found) > NUM_SESSIONS_MAX:
            refuse(path, number, f"more than {NUM_SESSIONS_MAX:,} sessions; split the file")
    if not found:
        raise ConfigError(f"{path} holds no sessions")
    return tuple(found)


def _refuse_other(path: Path) -> None:
    """Refuse a file in another format."""
    form = detect(path)
    if form != SESSIONS:
        raise ConfigError(
            f"{path} holds no sessions but {form}; prfaas trace import makes sessions of chats, "
            'and requests are for arrivals = "trace"'
        )


def _session(raw: _Session) -> Session | None:
    if raw.dup_of is not None or not raw.requests:
        return None
    in_range("block_size", raw.block_size, 1, 2**20, "tokens")
    if raw.start is not None:
        in_range("start", raw.start, 0, checks.SECONDS_MAX, "s")
    turns: list[Turn] = []
    _append(turns, raw.requests)
    if not turns:
        return None
    _check_runs("shared", raw.shared, checks.NUM_PROMPT_TOKENS_MAX)
    return Session(tuple(turns), raw.block_size, tuple(sorted(raw.shared)), raw.start)


def _append(
    turns: list[Turn],
    requests: list[_Request],
    before: int | None = None,
    lead_s: float = 0.0,
    base_s: float = 0.0,
) -> None:
    """Append the turns of one agent; those of a sub-agent start after the turn before them.

    Args:
        before: Turn that the first one waits for.
        lead_s: Additional wait of the first one, s.
        base_s: When the agent started, s since the start of the session.
    """
    ended_s = 0.0
    for request in requests:
        in_range("t", request.t, 0, checks.SECONDS_MAX, "s")
        gap_s = max(request.t - ended_s, 0.0)
        if request.sub is not None:
            if before is None:
                raise DroppedError("a sub-agent comes before the first request")
            _append(turns, request.sub, before, gap_s, base_s + request.t)
            continue
        think_s = gap_s if request.think is None else request.think
        turns.append(_turn(request, think_s + lead_s, before, base_s + request.t))
        if len(turns) > NUM_TURNS_MAX:
            raise DroppedError(f"more than {NUM_TURNS_MAX:,} requests in a session")
        before, lead_s, ended_s = len(turns) - 1, 0.0, request.t + (request.api or 0.0)


def _turn(request: _Request, think_s: float, before: int | None, at_s: float) -> Turn:
    if request.input_tokens is None or request.out is None:
        raise DroppedError("a request needs `in` and `out`, or `sub`")
    check_prompt("in", request.input_tokens)
    check_output("out", request.out)
    in_range("think, or t after the answer before", think_s, 0, checks.SECONDS_MAX, "s")
    _check_runs("h", request.h, request.input_tokens)
    runs, out = tuple(request.h), max(request.out, 1)
    return Turn(request.input_tokens, out, runs, think_s, before, at_s)


def _check_runs(field: str, runs: list[tuple[int, int]], num_blocks_max: int) -> None:
    for first, count in runs:
        in_range(f"first id of a run in {field}", first, 0, checks.BLOCK_ID_MAX)
        in_range(f"length of a run in {field}", count, 1, num_blocks_max, "blocks")
    if sum(count for _, count in runs) > num_blocks_max:
        raise DroppedError(
            f"{field} names too many blocks",
            f"{field} names more blocks than the {num_blocks_max:,} tokens of a prompt",
        )


NUM_BLOCKS = 4_000_000
"""Limit of blocks above which blocks of sessions are merged: the replay takes a second per million.
"""


def block_tokens_of(sessions: Sequence[Session], coarse_tokens: int) -> int:
    """Tokens of a block to flatten sessions with.

    Args:
        coarse_tokens: For sessions with many blocks, if it is a multiple of theirs.
    """
    own = max(session.block_tokens for session in sessions)
    num_tokens = sum(turn.num_prompt_tokens for session in sessions for turn in session.turns)
    divides = all(coarse_tokens % session.block_tokens == 0 for session in sessions)
    same = all(own % session.block_tokens == 0 for session in sessions)
    return coarse_tokens if divides and (num_tokens > own * NUM_BLOCKS or not same) else own


def flattened(sessions: Sequence[Session], block_tokens: int) -> tuple[RecordedRequest, ...]:
    """All turns, in order of arrival; ConfigError if the value is invalid.

    A session without a start begins when the one before it has ended, since nothing is known of
    what ran beside it.

    Args:
        sessions: In the order of their file.
        block_tokens: Tokens of a block of the requests, a multiple of those of the sessions.
    """
    names, shared_names = itertools.count(), SharedNames()
    rows: list[RecordedRequest] = []
    ended_s = 0.0
    for session in sessions:
        start_s = ended_s if session.start_s is None else session.start_s
        regroup = Regroup(session.block_tokens, block_tokens, names, session.shared, shared_names)
        for turn in session.turns:
            before = None if turn.after is None else session.turns[turn.after]
            blocks = regroup.blocks(turn.runs, None if before is None else before.runs)
            at_ns = round((start_s + turn.at_s) * NS_PER_S)
            rows.append(
                RecordedRequest(at_ns, turn.num_prompt_tokens, turn.num_output_tokens, blocks)
            )
        ended_s = start_s + max(turn.at_s for turn in session.turns)
    rows.sort(key=lambda row: row.at_ns)
    return tuple(rows)


SUFFIXES = (".jsonl", ".jsonl.gz")
_encoder = msgspec.json.Encoder()


def check_target(path: Path, source: Path, *, overwrite: bool = False) -> None:
    """Check where a file is to be written.

    Raises:
        ConfigError: Its name does not end as it should, or it exists and may not be replaced.
    """
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"{path}: the name of the file has to end in {' or '.join(SUFFIXES)}")
    if path.exists() and (not overwrite or path.samefile(source)):
        raise ConfigError(f"{path} exists; give another name, or --force to replace it")


def write_lines(path: Path, lines: Iterable[msgspec.Struct]) -> None:
    """Write JSON lines, gzipped where the name ends in ".gz"; the same lines give the same bytes;
    ConfigError if the file cannot be written."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as raw, _packed(path, raw) as file:
            for line in lines:
                file.write(_encoder.encode(line) + b"\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _packed(path: Path, raw: BufferedIOBase) -> Iterator[BufferedIOBase]:
    if path.suffix != ".gz":
        yield raw
        return
    with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
        yield cast(BufferedIOBase, file)


class RequestLine(msgspec.Struct, omit_defaults=True):
    """A request of a session, as `session_file` reads it."""

    t: float
    input_tokens: int = msgspec.field(name="in")
    out: int
    h: Sequence[tuple[int, int]]
    api: float | None = None
    think: float | None = None


class SessionLine(msgspec.Struct, omit_defaults=True):
    """A session, as `session_file` reads it."""

    id: int
    block_size: int
    requests: list[RequestLine]
    shared: list[tuple[int, int]] = []
    start: float | None = None


def session_lines(chats: Chats, pause_s: float) -> Iterator[SessionLine]:
    """The lines of all sessions.

    Args:
        pause_s: Before a turn whose pause is not recorded; how many is added to `chats.notes`.
    """
    starts = [turns[0].asked_at_s for turns in chats.sessions]
    first_s = min((at for at in starts if at is not None), default=0.0)
    for i, (turns, at) in enumerate(zip(chats.sessions, starts, strict=True)):
        start = None if at is None else min(round(at - first_s, 3), checks.SECONDS_MAX)
        requests = list(_requests(turns, pause_s, chats.notes))
        shared = _shared(turns, chats.numbers)
        yield SessionLine(i, BLOCK_TOKENS, requests, shared, start)


def _requests(
    turns: Sequence[ChatTurn], pause_s: float, notes: Counter[str]
) -> Iterator[RequestLine]:
    ended_s, before = 0.0, None
    for turn in turns:
        think = _between(before, turn.asked_at_s)
        if think is None and turn is not turns[0]:
            notes[UNTIMED] += 1
            think = pause_s
        api = _between(turn.asked_at_s, turn.answered_at_s) or 0.0
        t = min(ended_s + (think or 0.0), checks.SECONDS_MAX)
        yield RequestLine(
            round(t, 3),
            turn.num_prompt_tokens,
            turn.num_output_tokens,
            turn.runs,
            round(api, 3) or None,
            None if think is None else round(think, 3),
        )
        ended_s = t + api
        before = turn.asked_at_s if turn.answered_at_s is None else turn.answered_at_s


def _between(earlier_s: float | None, later_s: float | None) -> float | None:
    if earlier_s is None or later_s is None:
        return None
    return min(max(later_s - earlier_s, 0.0), checks.SECONDS_MAX)


def _shared(turns: Sequence[ChatTurn], numbers: BlockNumbers) -> list[tuple[int, int]]:
    """Runs of the session's blocks that other sessions have too."""
    seen = {run for turn in turns for run in turn.runs}
    found = {part for first, count in seen for part in numbers.shared(first, count)}
    merged: list[tuple[int, int]] = []
    for first, count in sorted(found):
        last, length = merged[-1] if merged else (0, 0)
        if merged and first <= last + length:
            merged[-1] = (last, max(length, first + count - last))
        else:
            merged.append((first, count))
    return merged
