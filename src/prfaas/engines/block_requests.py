"""An engine's view of its pool node: jobs under way, and what is known of blocks.

No vLLM in here: the tier translates. All methods but the two `_on_*` callbacks are called from the
engine's scheduler thread; none of them waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from prfaas.wire.messages.base import Message
from prfaas.wire.messages.codec import AnyMessage
from prfaas.wire.messages.engine import (
    HIT,
    ON_ITS_WAY,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Store,
    StoreDone,
)
from prfaas.wire.messages.fields import Key

ASK_AGAIN_NS = 5_000_000
"""A block on its way is asked for again after this long."""
ANSWER_MAX_NS = 1_000_000_000
"""A pool node that leaves a lookup unanswered for this long hangs; it answers in microseconds."""


class Answer(Enum):
    """What is known of a block."""

    HIT = "hit"
    MISS = "miss"
    WAIT = "wait"
    """Not known yet, or on its way: ask again."""


@dataclass(slots=True)
class JobDone:
    """A finished copy job.

    Attributes:
        job: Its number.
        ok: Whether all of it was done.
        loaded: Which keys of a load are good.
        sources: Pools that the blocks of a load came from.
    """

    job: int
    ok: bool
    loaded: list[bool] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    """Lookups of one engine request."""

    transfer_id: bytes | None
    source: str
    deadline_ns: int
    answers: dict[Key, int] = field(default_factory=dict)
    unasked: dict[Key, None] = field(default_factory=dict)
    asked: dict[Key, int] = field(default_factory=dict)
    """When each was asked, while there is no answer."""
    waiting: dict[Key, None] = field(default_factory=dict)
    waited_at_ns: int = 0


class BlockRequests:
    """Batches lookups, tracks jobs.

    Args:
        send: Queues a message for the pool node; False if it is not there.
        clock_ns: Monotonic clock, nanoseconds.
    """

    def __init__(self, send: Callable[[Message], bool], clock_ns: Callable[[], int]) -> None:
        self._send = send
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._lookups: dict[int, tuple[_Request, list[Key]]] = {}
        self._jobs: dict[int, Store | Load] = {}
        self._done: list[JobDone] = []
        self._next_lookup = 0

    # --- requests and lookups ---

    def begin(self, request: str, transfer_id: bytes | None, source: str, wait_ns: int) -> None:
        """A request came. Blocks that are on their way with `transfer_id` are waited for."""
        deadline = self._clock_ns() + wait_ns
        with self._lock:
            self._requests[request] = _Request(transfer_id, source, deadline)

    def end(self, request: str) -> None:
        """A request is over."""
        with self._lock:
            self._requests.pop(request, None)

    def look_up(self, request: str, key: Key) -> Answer:
        """What is known of a block; the first question about it is answered with WAIT."""
        with self._lock:
            state = self._requests.setdefault(request, _Request(None, "", 0))
            answer = state.answers.get(key)
            if answer is None:
                asked_at = state.asked.get(key)
                if asked_at is None:
                    state.unasked[key] = None
                    return Answer.WAIT
                limit = max(state.deadline_ns, asked_at + ANSWER_MAX_NS)
                return Answer.WAIT if self._clock_ns() < limit else Answer.MISS
        if answer == ON_ITS_WAY:
            return Answer.WAIT if self._clock_ns() < state.deadline_ns else Answer.MISS
        return Answer.HIT if answer == HIT else Answer.MISS

    def forget(self, request: str, keys: Iterable[Key]) -> None:
        """What was known of these blocks is no longer true: they count as missing."""
        state = self._requests.get(request)
        if state is not None:
            with self._lock:
                state.answers.update((key, 0) for key in keys)

    def flush(self) -> None:
        """Ask the pool node what look_up could not answer. Called once a scheduler step."""
        now = self._clock_ns()
        for state in self._requests.values():
            with self._lock:
                if state.waiting and now - state.waited_at_ns >= ASK_AGAIN_NS:
                    state.unasked.update(state.waiting)
                    state.waiting.clear()
                keys = list(state.unasked)
                state.unasked.clear()
            if keys:
                self._ask(state, keys)

    def _ask(self, state: _Request, keys: list[Key]) -> None:
        job = self._next_lookup
        self._next_lookup += 1
        with self._lock:
            state.asked.update(dict.fromkeys(keys, self._clock_ns()))
            self._lookups[job] = (state, keys)
        lookup = Lookup(job=job, keys=keys, transfer_id=state.transfer_id, source=state.source)
        if not self._send(lookup):
            self._answer(job, bytes(len(keys)))

    def _answer(self, job: int, found: bytes) -> None:
        with self._lock:
            state, keys = self._lookups.pop(job, (None, []))
            if state is None:
                return
            state.waited_at_ns = self._clock_ns()
            # What the answer leaves out is missing.
            for key, answer in zip(keys, found.ljust(len(keys), b"\0"), strict=False):
                state.asked.pop(key, None)
                state.answers[key] = answer
                if answer == ON_ITS_WAY:
                    state.waiting[key] = None

    # --- jobs ---

    def submit(self, job: Store | Load) -> None:
        """Start a copy job; its end is reported by `take_done`."""
        with self._lock:
            self._jobs[job.job] = job
        if not self._send(job):
            self._finish(job.job, ok=False, loaded=b"")

    def take_done(self) -> list[JobDone]:
        """Jobs that finished since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done

    @property
    def num_jobs(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    def _finish(self, job: int, *, ok: bool, loaded: bytes, sources: Sequence[str] = ()) -> None:
        with self._lock:
            message = self._jobs.pop(job, None)
            if message is None:
                return
            if isinstance(message, Store):
                self._done.append(JobDone(job, ok))
                return
            # An answer about other keys than were asked for says nothing about these.
            good = loaded if len(loaded) == len(message.keys) else bytes(len(message.keys))
            self._done.append(JobDone(job, all(good), [bool(flag) for flag in good], list(sources)))

    # --- from the reader thread ---

    def on_message(self, message: AnyMessage) -> None:
        """An answer of the pool node."""
        if isinstance(message, LookupDone):
            self._answer(message.job, message.found)
        elif isinstance(message, StoreDone):
            self._finish(message.job, ok=message.stored, loaded=b"")
        elif isinstance(message, LoadDone):
            self._finish(message.job, ok=True, loaded=message.loaded, sources=message.sources)

    def on_lost(self) -> None:
        """The pool node is gone: nothing that was asked will be answered, nothing is on its way."""
        with self._lock:
            lookups, jobs = list(self._lookups.items()), list(self._jobs)
            for state in self._requests.values():
                state.answers.update(dict.fromkeys(state.waiting, 0))
                state.waiting.clear()
        for job, (_, keys) in lookups:
            self._answer(job, bytes(len(keys)))
        for job in jobs:
            self._finish(job, ok=False, loaded=b"")
