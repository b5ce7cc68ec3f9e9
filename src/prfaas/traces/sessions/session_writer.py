"""Conversion of chats to the lines of a session file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from prfaas.traces import limits
from prfaas.traces.sessions.block_chain import BlockNumbers
from prfaas.traces.sessions.chats import UNTIMED, Chats, ChatTurn
from prfaas.traces.sessions.text_units import BLOCK_TOKENS


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
        start = None if at is None else min(round(at - first_s, 3), limits.SECONDS_MAX)
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
        t = min(ended_s + (think or 0.0), limits.SECONDS_MAX)
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
    return min(max(later_s - earlier_s, 0.0), limits.SECONDS_MAX)


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
