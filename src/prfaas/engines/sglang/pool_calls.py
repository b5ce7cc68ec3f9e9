"""Calls to a pool node that wait for the answer, for threads that may wait.

SGLang calls a storage backend from threads of its own and takes the return value as the answer. So
every call has a time limit. When it is over, the connection is shut before the call returns: from
then on the pool node reads and writes no row of it, and SGLang may reuse its pages. Until the pool
node has accepted the engine again, calls return at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.engines.pool_client import LIMITS, ClientLimits, PoolConnection
from prfaas.log_throttle import LogThrottle
from prfaas.wire.messages.codec import AnyMessage
from prfaas.wire.messages.engine import (
    HIT,
    EngineHello,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Store,
    StoreDone,
)
from prfaas.wire.messages.fields import Key

log = logging.getLogger(__name__)

JOB_KEYS_MAX = 1024
"""Keys of one message; SGLang asks for 128 pages at a time."""
CALL_KEYS_MAX = 65_536
"""Keys of one call; what is beyond is missing."""
Job = Lookup | Store | Load
Answer = LookupDone | StoreDone | LoadDone


@dataclass(slots=True)
class _Open:
    """A job without an answer."""

    ended: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None


class PoolCalls:
    """One engine process's memory at its pool node. Any thread may call.

    Args:
        path: The pool node's unix socket.
        hello: First message of this engine.
        descriptor: Of the shared memory; stays the caller's.
        wait_s: Time limit of a call, seconds.
        limits: Times and limits of the connection.
    """

    def __init__(
        self,
        path: Path,
        hello: EngineHello,
        descriptor: int,
        wait_s: float,
        limits: ClientLimits = LIMITS,
    ) -> None:
        self._wait_s = wait_s
        self._path = path
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._next_job = 0
        self._said = LogThrottle()
        self._client = PoolConnection(
            path, hello, descriptor, self._on_message, self._on_lost, limits
        )

    @property
    def is_connected(self) -> bool:
        """Return True if the pool node has accepted this engine."""
        return self._client.is_connected

    def close(self) -> None:
        """End the connection; calls under way return without an answer."""
        self._client.close()

    def look_up(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether the pool node has the block; False without an answer."""
        found: list[bool] = []
        deadline = time.monotonic() + self._wait_s
        for part in _parts(keys):
            answer = self._call(Lookup(job=self._number(), keys=part), deadline)
            if not isinstance(answer, LookupDone) or len(answer.found) != len(part):
                break
            found += [flag == HIT for flag in answer.found]
        return _filled(found, keys)

    def store(self, keys: Sequence[Key], rows: Sequence[int], sources: Collection[str]) -> bool:
        """Have rows kept as blocks; the rows may be reused afterwards; returns true if the pool
        node has all of them now.

        Args:
            keys: Names of the blocks.
            sources: Pools of whose blocks these were computed.
        """
        if len(keys) > CALL_KEYS_MAX:
            return False
        deadline = time.monotonic() + self._wait_s
        for start in range(0, len(keys), JOB_KEYS_MAX):
            end = start + JOB_KEYS_MAX
            job = Store(
                job=self._number(),
                keys=list(keys[start:end]),
                rows=list(rows[start:end]),
                sources=list(sources),
            )
            answer = self._call(job, deadline)
            if not isinstance(answer, StoreDone) or not answer.stored:
                return False
        return True

    def load(self, keys: Sequence[Key], rows: Sequence[int]) -> tuple[list[bool], set[str]]:
        """Have blocks copied into rows.

        Args:
            keys: Names of the blocks.
            rows: One row a key. The content of a row whose block is missing is not defined.

        Returns:
            For each key whether its row has the block; and the pools that the blocks came from.
        """
        loaded: list[bool] = []
        sources = set[str]()
        deadline = time.monotonic() + self._wait_s
        for part in _parts(keys):
            chosen = list(rows[len(loaded) : len(loaded) + len(part)])
            answer = self._call(Load(job=self._number(), keys=part, rows=chosen), deadline)
            if not isinstance(answer, LoadDone) or len(answer.loaded) != len(part):
                break
            loaded += [bool(flag) for flag in answer.loaded]
            sources.update(answer.sources)
        return _filled(loaded, keys), sources

    def _number(self) -> int:
        with self._lock:
            self._next_job += 1
            return self._next_job

    def _call(self, job: Job, deadline: float) -> Answer | None:
        """The answer to a job; None if the pool node is not there or too slow."""
        if time.monotonic() >= deadline:
            return None  # Earlier parts took the time; this one would hang up at once.
        waiting = _Open()
        with self._lock:
            self._open[job.job] = waiting
        if not self._client.send(job):
            with self._lock:
                self._open.pop(job.job, None)
            return None
        if not waiting.ended.wait(max(0.0, deadline - time.monotonic())):
            self._client.hang_up()
            with self._lock:
                self._open.pop(job.job, None)
            if self._said.is_new("slow"):
                log.warning(
                    "the pool node at %s did not answer within %.1f s: its pages are missing until "
                    "it does",
                    self._path,
                    self._wait_s,
                )
            return None
        return waiting.answer

    # From the reader thread

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, LookupDone | StoreDone | LoadDone):
            with self._lock:
                waiting = self._open.pop(message.job, None)
            if waiting is not None:
                waiting.answer = message
                waiting.ended.set()

    def _on_lost(self) -> None:
        with self._lock:
            lost, self._open = list(self._open.values()), {}
        for waiting in lost:
            waiting.ended.set()


def _parts(keys: Sequence[Key]) -> list[list[Key]]:
    kept = keys[:CALL_KEYS_MAX]
    return [list(kept[at : at + JOB_KEYS_MAX]) for at in range(0, len(kept), JOB_KEYS_MAX)]


def _filled(flags: list[bool], keys: Sequence[Key]) -> list[bool]:
    """Flags for all keys; those without an answer are missing."""
    return flags + [False] * (len(keys) - len(flags))
