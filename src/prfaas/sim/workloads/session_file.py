"""A file of recorded agent sessions: one session a line, runs of block ids instead of all ids.

The form is that of kv-cache-tester's traces of Claude Code, run-length encoded:

    {"id": ..., "block_size": 64, "requests": [
        {"in": prompt tokens, "out": output tokens, "h": [[first id, run length], ...],
         "t": s since the start, "api": s until the answer, "think": s from the answer before},
        {"t": ..., "sub": [requests of a sub-agent]}]}

Ids are the session's own. A line with `dup_of` repeats another session and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from prfaas.errors import ConfigError
from prfaas.sim.workloads.reading import (
    BLOCK_ID_MAX,
    SECONDS_MAX,
    decode,
    in_range,
    read_lines,
    refuse,
)
from prfaas.sim.workloads.trace import check_lengths

NUM_TURNS_MAX = 100_000
"""Of one session."""
NUM_SESSIONS_MAX = 1_000_000


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


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        num_prompt_tokens: Prompt, tokens.
        num_output_tokens: Output, tokens.
        runs: First id and length of each run of block ids; the last block may be a partial one.
        think_s: From the end of the request before, of the agent that starts it, s.
        after: Index of the turn it waits for; None for the first.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    runs: tuple[tuple[int, int], ...]
    think_s: float
    after: int | None


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, each after the one it waits for; blocks of `block_tokens` tokens."""

    turns: tuple[Turn, ...]
    block_tokens: int


def read_sessions(path: Path) -> tuple[Session, ...]:
    """The sessions of a file that have a turn.

    Raises:
        ConfigError: The file or a line of it is wrong.
    """
    decoder = msgspec.json.Decoder(_Session)
    found = []
    for number, line in read_lines(path):
        raw = decode(decoder, path, number, line)
        if raw.dup_of is not None or not raw.requests:
            continue
        in_range(path, number, "block_size", raw.block_size, 1, 2**20, "tokens")
        turns: list[Turn] = []
        _append(turns, raw.requests, _Place(path, number))
        found.append(Session(tuple(turns), raw.block_size))
        if len(found) > NUM_SESSIONS_MAX:
            refuse(path, number, f"more than {NUM_SESSIONS_MAX:,} sessions; split the file")
    if not found:
        raise ConfigError(f"{path} holds no sessions")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    line: int


def _append(
    turns: list[Turn],
    requests: list[_Request],
    place: _Place,
    before: int | None = None,
    lead_s: float = 0.0,
) -> None:
    """Append the turns of one agent; those of a sub-agent start after the turn before them.

    Args:
        turns: Grows.
        requests: Of the agent.
        place: For errors.
        before: Turn that the first one waits for.
        lead_s: The first one waits so much longer.
    """
    ended_s = 0.0
    for request in requests:
        gap_s = max(request.t - ended_s, 0.0)
        if request.sub is not None:
            if before is None:
                refuse(place.path, place.line, "a sub-agent comes before the first request")
            _append(turns, request.sub, place, before, gap_s)
            continue
        think_s = gap_s if request.think is None else request.think
        turns.append(_turn(request, place, think_s + lead_s, before))
        if len(turns) > NUM_TURNS_MAX:
            refuse(place.path, place.line, f"more than {NUM_TURNS_MAX:,} requests in a session")
        before, lead_s, ended_s = len(turns) - 1, 0.0, request.t + (request.api or 0.0)


def _turn(request: _Request, place: _Place, think_s: float, before: int | None) -> Turn:
    where = (place.path, place.line)
    if request.input_tokens is None or request.out is None:
        refuse(*where, "a request needs `in` and `out`, or `sub`")
    check_lengths(*where, ("in", request.input_tokens), ("out", request.out))
    in_range(*where, "think, or t after the answer before", think_s, 0, SECONDS_MAX, "s")
    for first, count in request.h:
        in_range(*where, "first id of a run in h", first, 0, BLOCK_ID_MAX)
        in_range(*where, "length of a run in h", count, 1, request.input_tokens, "blocks")
    if sum(count for _, count in request.h) > request.input_tokens:
        refuse(*where, f"h names more blocks than the {request.input_tokens:,} tokens of `in`")
    return Turn(request.input_tokens, max(request.out, 1), tuple(request.h), think_s, before)
