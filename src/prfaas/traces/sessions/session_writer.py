"""Writers of traces and of session files."""

from __future__ import annotations

import gzip
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import cast

import msgspec

from prfaas.errors import ConfigError
from prfaas.traces import checks
from prfaas.traces.sessions.block_chain import BLOCK_TOKENS, BlockNumbers
from prfaas.traces.sessions.chats import UNTIMED, Chats, ChatTurn

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
    """Write JSON lines, gzipped where the name ends in ".gz"; the same lines give the same bytes.

    Raises:
        ConfigError: The file cannot be written.
    """
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
