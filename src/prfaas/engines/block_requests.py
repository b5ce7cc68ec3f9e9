"""An engine's view of its pool node: running jobs, and the state of blocks.

No vLLM in here: the tier translates. All methods but the two `on_*` callbacks are called from the
engine's scheduler thread; only `wait_for_news` waits.
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
    MISS,
    ON_ITS_WAY,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Store,
    StoreDone,
    TransferOver,
)
from prfaas.wire.messages.fields import Key

ASK_AGAIN_NS, ASK_AGAIN_MAX_NS, ASK_AGAIN_KEY_NS = 20_000_000, 1_000_000_000, 100_000
"""Blocks in transit are asked for again after this long at least and at most, and in between so
long for each: engine and pool node then spend less than a tenth of a core on asking. The pool node
reports the end of a transfer without being asked."""
ANSWER_MAX_NS = 1_000_000_000
"""A pool node that leaves a lookup unanswered for this long hangs; it answers in microseconds."""


class BlockState(Enum):
    """State of a block."""

    HIT = "hit"
    MISS = "miss"
    WAIT = "wait"
    """Unknown or in transit: ask again."""


@dataclass(slots=True)
class JobDone:
    """A finished copy job."""

    job: int
    ok: bool
    """True if all of it was done."""
    loaded: list[bool] = field(default_factory=list)
    """Which keys of a load are good."""
    sources: list[str] = field(default_factory=list)
    """Pools that the blocks of a load came from."""


@dataclass(frozen=True, slots=True)
class Lookups:
    """Blocks that a request looked up, by their last answer."""

    num_found: int
    num_missing: int
    num_late: int
    """Still in transit when the request waited no longer."""
    num_unanswered: int
    """Asked for without an answer."""


@dataclass(slots=True)
class _Request:
    """Lookups of one engine request."""

    transfer_id: bytes | None
    source: str
    deadline_ns: int
    answers: dict[Key, int] = field(default_factory=dict)
    unasked: dict[Key, None] = field(default_factory=dict)
    asked: dict[Key, int] = field(default_factory=dict)
    """Time of each request without an answer."""
    waiting: dict[Key, None] = field(default_factory=dict)
    """On their way, to be asked again."""
    ask_at_ns: int = 0
    """Time at which `waiting` is requested again."""
    wait_until_ns: int = 0
    """Deadline of the first answer WAIT since `must_wait` returned False; 0 without one."""
    has_news: bool = False
    """An answer has changed since then."""


class BlockRequests:
    """Batches lookups, tracks jobs.

    Args:
        send: Queues a message for the pool node; False if it is not there.
    """

    def __init__(self, send: Callable[[Message], bool], clock_ns: Callable[[], int]) -> None:
        self._send = send
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._lookups: dict[int, tuple[_Request, list[Key]]] = {}
        self._jobs: dict[int, Store | Load] = {}
        self._done: list[JobDone] = []
        self._news = threading.Event()
        self._next_lookup = 0

    # --- requests and lookups ---

    def begin(self, request: str, transfer_id: bytes | None, source: str, wait_ns: int) -> None:
        """A request came. Blocks that are in transit with `transfer_id` are waited for."""
        deadline = self._clock_ns() + wait_ns
        with self._lock:
            self._requests[request] = _Request(transfer_id, source, deadline)

    def end(self, request: str) -> Lookups | None:
        """A request is over.

        Returns:
            Result of its lookups; None if it waited for no transfer.
        """
        with self._lock:
            state = self._requests.pop(request, None)
        if state is None or state.transfer_id is None:
            return None
        answers = list(state.answers.values())
        num_found, num_late = answers.count(HIT), answers.count(ON_ITS_WAY)
        num_missing = len(answers) - num_found - num_late
        return Lookups(num_found, num_missing, num_late, len(state.asked))

    def look_up(self, request: str, key: Key) -> BlockState:
        """Return the state of a block; the first lookup returns WAIT."""
        with self._lock:
            state = self._requests.setdefault(request, _Request(None, "", 0))
            answer, now = state.answers.get(key), self._clock_ns()
            if answer not in (None, ON_ITS_WAY):
                return BlockState.HIT if answer == HIT else BlockState.MISS
            limit = state.deadline_ns
            if answer is None:
                asked_at = state.asked.get(key)
                if asked_at is None:
                    state.unasked[key] = None
                limit = max(limit, (now if asked_at is None else asked_at) + ANSWER_MAX_NS)
            if now >= limit:
                return BlockState.MISS
            state.wait_until_ns = min(state.wait_until_ns or limit, limit)
            return BlockState.WAIT

    def must_wait(self, request: str) -> bool:
        """Return True while every lookup of a request would be answered as it was.

        That is the case from an answer WAIT until the pool node or the time changes one. A False
        begins a new round: the caller looks up again.
        """
        with self._lock:
            state = self._requests.get(request)
            if state is None:
                return False
            if not state.has_news and self._clock_ns() < state.wait_until_ns:
                return True
            state.has_news, state.wait_until_ns = False, 0
            return False

    def wait_for_news(self, limit_s: float) -> None:
        """Wait for a message of the pool node; return immediately if none is expected.

        Messages since the last call count.
        """
        with self._lock:
            is_awaited = bool(self._lookups or self._jobs) or any(
                state.waiting for state in self._requests.values()
            )
        if is_awaited:
            self._news.wait(limit_s)
        self._news.clear()

    def forget(self, request: str, keys: Iterable[Key]) -> None:
        """Mark these blocks as missing."""
        state = self._requests.get(request)
        if state is not None:
            with self._lock:
                state.answers.update(dict.fromkeys(keys, MISS))
                state.has_news = True

    def flush(self) -> None:
        """Ask the pool node what look_up could not answer. Called once a scheduler step."""
        now = self._clock_ns()
        for state in self._requests.values():
            with self._lock:
                if state.waiting and now >= state.ask_at_ns:
                    if now < state.deadline_ns:
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
            # Blocks that are not in the answer are missing.
            for key, answer in zip(keys, found.ljust(len(keys), b"\0"), strict=False):
                state.asked.pop(key, None)
                state.has_news |= state.answers.get(key) != answer
                state.answers[key] = answer
                if answer == ON_ITS_WAY:
                    state.waiting[key] = None
            pause_ns = min(len(state.waiting) * ASK_AGAIN_KEY_NS, ASK_AGAIN_MAX_NS)
            now = self._clock_ns()
            # Once more shortly before the deadline, when what is not known to be there is missing.
            ask_at_ns = min(now + pause_ns, state.deadline_ns - ASK_AGAIN_NS)
            state.ask_at_ns = max(ask_at_ns, now + ASK_AGAIN_NS)

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
            # An answer with other keys does not apply to these.
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
        elif isinstance(message, TransferOver):
            self._ask_at_once(message.transfer_id)
        self._news.set()

    def _ask_at_once(self, transfer_id: bytes) -> None:
        """End the wait for the blocks of a transfer."""
        with self._lock:
            for state in self._requests.values():
                if state.transfer_id == transfer_id:
                    state.ask_at_ns = 0

    def on_lost(self) -> None:
        """The pool node is gone: nothing that was asked will be answered, nothing is in transit."""
        with self._lock:
            lookups, jobs = list(self._lookups.items()), list(self._jobs)
            for state in self._requests.values():
                state.answers.update(dict.fromkeys(state.waiting, MISS))
                state.waiting.clear()
                state.has_news = True
        for job, (_, keys) in lookups:
            self._answer(job, bytes(len(keys)))
        for job in jobs:
            self._finish(job, ok=False, loaded=b"")
        self._news.set()
