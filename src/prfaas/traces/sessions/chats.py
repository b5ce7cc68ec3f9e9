"""Sessions from chat transcripts: every answer is a request, its prompt is all that was before."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.traces.checks import (
    LIMITS,
    NUM_OUTPUT_TOKENS_MAX,
    NUM_SESSIONS_MAX,
    NUM_TURNS_MAX,
    DroppedError,
    Drops,
    TraceLimits,
)
from prfaas.traces.lines import OnProgress, read_lines, refuse, text_of
from prfaas.traces.reader import refuse_if_damaged
from prfaas.traces.sessions.block_chain import BlockChain, BlockNumbers, Runs, TextUnits
from prfaas.traces.sessions.messages import SessionMessage, transcript_of

REPEATED = "answers that an earlier line of the session has"
UNANSWERED = "prompts without an answer"
EMPTY = "sessions without an answer to a prompt"
NOT_TEXT = "parts that are no text (images, audio), counted as 0 tokens"
UNTIMED = "pauses before a turn that are not recorded"


@dataclass(slots=True)
class ChatTurn:
    """A request: lengths in tokens, runs of the prompt's blocks, instants in s or None."""

    num_prompt_tokens: int
    num_output_tokens: int
    runs: Runs
    asked_at_s: float | None
    answered_at_s: float | None


@dataclass(frozen=True, slots=True)
class Chats:
    """Chat transcripts as they were read."""

    sessions: tuple[tuple[ChatTurn, ...], ...]
    """Turns of each session that has one."""
    numbers: BlockNumbers
    """Of the blocks."""
    drops: Drops
    """Lines that gave no messages."""
    notes: Counter[str]
    """Number of omissions and assumptions within lines, by kind."""

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(map(len, self.sessions))


def read_chats(
    path: Path,
    units: TextUnits,
    *,
    damaged_max: float = 0.0,
    num_requests: int | None = None,
    on_progress: OnProgress | None = None,
    limits: TraceLimits = LIMITS,
) -> Chats:
    """Read chat transcripts; of their texts only lengths and numbers of blocks are kept.

    Args:
        path: JSON lines as `transcript_of` reads them, gzipped or not.
        units: What texts are measured in.
        damaged_max: Largest share of damaged lines, in [0, 1). With 0 the first one is an error.
        num_requests: Reading ends with this number of requests, or a few more; None is all.
        on_progress: Called now and then with the bytes of the file that were read.
        limits: On its size and what it holds.

    Raises:
        ConfigError: The file cannot be read, holds no answer, is too large, or too much of it is
            damaged.
    """
    numbers = BlockNumbers(secrets.token_bytes(32), limits.num_chat_blocks_max)
    reader = _Reader(path, units, numbers, limits)
    for number, line in read_lines(path, on_progress, limits):
        reader.drops.num_lines += 1
        try:
            reader.read(number, text_of(line, limits))
        except DroppedError as error:
            if error.damaged and damaged_max == 0:
                refuse(path, number, str(error))
            reader.drops.add(number, error)
        if num_requests is not None and reader.num_requests >= num_requests:
            break
    refuse_if_damaged(path, reader.drops, damaged_max)
    return reader.result()


@dataclass(slots=True)
class _Reader:
    path: Path
    units: TextUnits
    numbers: BlockNumbers
    limits: TraceLimits
    drops: Drops = field(default_factory=Drops)
    notes: Counter[str] = field(default_factory=Counter)
    by_id: dict[str, _Session] = field(default_factory=dict)
    sessions: list[_Session] = field(default_factory=list)
    num_requests: int = 0

    def read(self, number: int, line: bytes) -> None:
        """Add the messages of a line to their session."""
        transcript = transcript_of(line)
        # A line with a whole session and no name is a separate session.
        named = bool(transcript.session) or not transcript.from_start
        session = self.by_id.get(transcript.session) if named else None
        if session is None:
            if len(self.sessions) == NUM_SESSIONS_MAX:
                refuse(self.path, number, f"more than {NUM_SESSIONS_MAX:,} sessions; split it")
            session = _Session(
                len(self.sessions),
                self.numbers,
                self.units,
                self.notes,
                self.limits.num_prompt_tokens_max,
            )
            self.sessions.append(session)
            if named:
                self.by_id[transcript.session] = session
        before = len(session.turns)
        if transcript.from_start:
            session.restart()
        for message in transcript.messages:
            session.add(message)
        if transcript.from_start:
            session.end()
        self.num_requests += len(session.turns) - before
        limit = self.limits.num_requests_max
        if self.num_requests > limit:
            refuse(self.path, number, f"more than {limit:,} requests; split it")

    def result(self) -> Chats:
        """The sessions that have a turn; ConfigError if none has one."""
        for session in self.sessions:
            session.end()
        found = tuple(tuple(session.turns) for session in self.sessions if session.turns)
        self.notes[EMPTY] += len(self.sessions) - len(found)
        if not found:
            reasons = [*self.drops.reasons, *+self.notes]
            why = f" ({'; '.join(reasons)})" if reasons else ""
            raise ConfigError(f"{self.path} holds no answer of a model{why}")
        return Chats(found, self.numbers, self.drops, self.notes)


class _Session:
    """Follows the messages of a session.

    Args:
        units: What texts are measured in.
    """

    def __init__(
        self,
        index: int,
        numbers: BlockNumbers,
        units: TextUnits,
        notes: Counter[str],
        num_prompt_tokens_max: int,
    ) -> None:
        self._num_prompt_tokens_max = num_prompt_tokens_max
        self.turns: list[ChatTurn] = []
        self._index, self._numbers, self._units, self._notes = index, numbers, units, notes
        self._seen: set[bytes] = set()
        self.restart()

    def restart(self) -> None:
        """The next message is the first again."""
        self._chain = BlockChain(self._numbers, self._index, self._units)
        self._open: ChatTurn | None = None
        self._asked_at_s: float | None = None
        self._unanswered = False

    def add(self, message: SessionMessage) -> None:
        """Add a message.

        Raises:
            DroppedError: The session becomes too long.
        """
        self._notes[NOT_TEXT] += message.num_media
        text = self._units.cut(message.text)
        if not message.is_answer:
            self._close()
            self._asked_at_s, self._unanswered = message.at_s, True
        elif self._chain.num_tokens:
            self._answer(message, len(text) // self._units.unit_bytes)
        self._chain.add(message.role, text)

    def _answer(self, message: SessionMessage, num_units: int) -> None:
        if self._open is None:
            prompt = self._chain.num_tokens
            if prompt > self._num_prompt_tokens_max or len(self.turns) == NUM_TURNS_MAX:
                raise DroppedError(
                    "the rest of a session that is too long",
                    f"a prompt of {prompt:,} tokens after {len(self.turns):,} turns; at most "
                    f"{self._num_prompt_tokens_max:,} and {NUM_TURNS_MAX:,}",
                )
            self._open = ChatTurn(prompt, 0, self._chain.runs(), self._asked_at_s, None)
            self._unanswered = False
        hidden = len(self._units.cut(message.hidden)) // self._units.unit_bytes
        num_tokens = self._units.num_tokens(num_units + hidden)
        self._open.num_output_tokens += num_tokens
        if message.at_s is not None:
            self._open.answered_at_s = message.at_s

    def _close(self) -> None:
        """Keep the turn that has been answered, unless an earlier line had it."""
        turn, self._open = self._open, None
        if turn is None:
            return
        digest = self._chain.digest()
        if digest in self._seen:
            self._notes[REPEATED] += 1
            return
        self._seen.add(digest)
        turn.num_output_tokens = min(max(turn.num_output_tokens, 1), NUM_OUTPUT_TOKENS_MAX)
        self.turns.append(turn)

    def end(self) -> None:
        """Finish after the last message."""
        self._close()
        self._notes[UNANSWERED] += self._unanswered
        self._unanswered = False
