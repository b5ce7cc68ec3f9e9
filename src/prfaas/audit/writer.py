"""The thread that writes the audit log of a process.

    any thread ──write──► queue ──batch──► one write call ──► checkpoint, rotation

`write` only appends to a queue: neither the disk nor the signature is waited for. A record is in
the file BATCH_S later at most, and signed and on the disk after the checkpoint interval. While the
log cannot be written, records wait in the queue, up to a limit; more are lost, counted, and stated
in the log (`gap`) once it can be written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from itertools import islice

from prfaas.audit.chain_file import ChainFile, Record
from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.settings import AuditSettings, OnFull
from prfaas.core.audit.chain import Fields
from prfaas.core.audit.records import CheckpointCause, RecordKind
from prfaas.logs import log_event

log = logging.getLogger(__name__)

BATCH_S = 0.5
BATCH_MAX = 1000
REPEAT_S = 60.0
"""Time between two log lines about the same failure."""


class AuditLog:
    """Writes records of one process.

    Raises:
        ConfigError: The folder, the key or the end of the log cannot be used.
    """

    def __init__(self, settings: AuditSettings, process: str, metrics: AuditMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._file = ChainFile(settings, process)
        self._changed = threading.Condition()
        self._queue: deque[Record] = deque()
        self._num_queued = self._num_written = 0
        self._num_lost = 0
        """Lost records that no line states yet."""
        self._waiting: list[tuple[int, asyncio.Future[bool], asyncio.AbstractEventLoop]] = []
        self._is_failing = self._is_urgent = self._is_closing = False
        self._failed_at = -REPEAT_S
        self._signed_at = time.monotonic()
        self._signed_lines = self._file.signed_lines
        log_event(
            log,
            logging.INFO,
            "audit_log",
            folder=str(settings.folder),
            process=process,
            line=self._file.num_lines,
            public_key=self._file.public_key,
        )
        if self._file.cut_lines or self._file.head:
            lines, head = self._file.cut_lines, self._file.head
            log_event(log, logging.ERROR, "audit_log_was_cut", lines=lines, head=head)
        self._show()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    @property
    def accepts(self) -> bool:
        """False while the log cannot be written and the setting is "closed"."""
        return not self._is_failing or self._settings.on_full is OnFull.OPEN

    def write(self, fields: Fields) -> None:
        """Queue a record; any thread may call it."""
        record = time.time_ns(), fields
        with self._changed:
            if len(self._queue) >= self._settings.queue_max or self._is_closing:
                self._num_lost += 1
                self._metrics.lost.inc()
                return
            self._queue.append(record)
            self._num_queued += 1
            if len(self._queue) == 1:
                self._changed.notify()

    async def written(self) -> bool:
        """Wait until all queued records are in the file; False if they cannot be written now."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()
        with self._changed:
            if self._is_failing or self._is_closing:
                return False
            if self._num_written >= self._num_queued:
                return True
            self._waiting.append((self._num_queued, done, loop))
            self._is_urgent = True
            self._changed.notify()
        return await done

    def close(self) -> None:
        """Write what is queued and a last checkpoint. Blocks for as long as the disk takes."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    # --- on the thread ---

    def _run(self) -> None:
        before = 0.0
        while True:
            batch, is_last = self._next()
            try:
                self._put(batch, is_last=is_last)
            except OSError as error:
                self._failed(error, is_last=is_last)
            else:
                self._succeeded()
            now = time.thread_time()
            self._metrics.cpu_seconds.inc(now - before)
            before = now
            if is_last:
                break
        self._file.close()

    def _next(self) -> tuple[list[Record], bool]:
        """Wait for records, a checkpoint that is due, or the end."""
        with self._changed:
            if self._is_failing:
                self._changed.wait_for(lambda: self._is_closing, self._settings.retry_s)
            else:
                self._changed.wait_for(lambda: self._queue or self._is_closing, self._patience_s)
                self._changed.wait_for(
                    lambda: (
                        self._is_closing or self._is_urgent or not 0 < len(self._queue) < BATCH_MAX
                    ),
                    BATCH_S,
                )
            is_last = self._is_closing
            return list(islice(self._queue, None if is_last else BATCH_MAX)), is_last

    @property
    def _patience_s(self) -> float | None:
        """Time until a checkpoint is due; None without new lines."""
        if self._file.num_lines == self._file.signed_lines:
            return None
        return max(0.0, self._signed_at + self._settings.checkpoint_s - time.monotonic())

    def _put(self, batch: list[Record], *, is_last: bool) -> None:
        lost, records = self._num_lost, list(batch)
        if lost:
            records.append((time.time_ns(), {"kind": RecordKind.GAP, "lost": lost}))
        if records:
            self._file.append(records)
            with self._changed:
                self._num_lost -= lost
                for _ in batch:
                    self._queue.popleft()
                self._num_written += len(batch)
        if is_last:
            self._file.checkpoint(CheckpointCause.END)
        elif self._file.is_large:
            self._file.rotate()
        elif self._file.num_lines - self._file.signed_lines >= self._settings.checkpoint_lines:
            self._file.checkpoint(CheckpointCause.LINES)
        elif self._patience_s == 0.0:
            self._file.checkpoint(CheckpointCause.TIME)

    def _succeeded(self) -> None:
        if self._file.signed_lines != self._signed_lines:
            self._signed_at = time.monotonic()
            self._signed_lines = self._file.signed_lines
        if self._is_failing:
            log_event(log, logging.WARNING, "audit_log_works_again", line=self._file.num_lines)
            self._failed_at = -REPEAT_S
        self._is_failing = False
        self._show()
        self._answer(is_written=True)

    def _failed(self, error: OSError, *, is_last: bool) -> None:
        self._is_failing = True
        now = time.monotonic()
        if now - self._failed_at >= REPEAT_S or is_last:
            self._failed_at = now
            log_event(
                log,
                logging.ERROR,
                "audit_log_fails",
                why=error.strerror or str(error),
                on_full=self._settings.on_full.value,
                waiting=len(self._queue),
                lost=self._num_lost,
            )
        if is_last:
            self._metrics.lost.inc(len(self._queue))
        self._show()
        self._answer(is_written=False)

    def _show(self) -> None:
        self._metrics.last_line.set(self._file.num_lines)
        self._metrics.signed_line.set(self._file.signed_lines)
        self._metrics.failing.set(self._is_failing)
        self._metrics.writes.inc(self._file.take_writes())

    def _answer(self, *, is_written: bool) -> None:
        with self._changed:
            ready = [each for each in self._waiting if each[0] <= self._num_written]
            ready = ready if is_written else self._waiting
            self._waiting = [each for each in self._waiting if each not in ready]
            self._is_urgent = bool(self._waiting)
        for _, done, loop in ready:
            with contextlib.suppress(RuntimeError):  # Its loop has ended.
                loop.call_soon_threadsafe(_resolve, done, is_written)


def _resolve(done: asyncio.Future[bool], is_written: bool) -> None:
    if not done.done():
        done.set_result(is_written)
