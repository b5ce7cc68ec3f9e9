"""A prefill instance: first come first served, one prompt at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from prfaas.records import MutableRecord
from prfaas.sim.resources.transport import Transport
from prfaas.sim.system.clock import Action, Clock
from prfaas.sim.system.request import Request


class PrefillJob(MutableRecord, eq=False):
    """A prompt to prefill."""

    request: Request
    attempt: int
    """The request's attempt this belongs to."""
    chunks: list[tuple[int, int]]
    """End of each chunk: tokens computed, ns since the start. The last ends the job, and has the
    time that it takes."""
    transport: Transport | None = None
    """Ships the computed blocks; None where they stay in their pool."""


class PrefillInstance:
    """One instance.

    Args:
        on_start: A job leaves the queue.
        on_done: A job is done; its last chunk has been computed.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        on_start: Callable[[PrefillJob], None],
        on_done: Callable[[PrefillJob], None],
    ) -> None:
        self.name = name
        self.up = self.answers = True
        self.busy_ns = 0
        self._clock = clock
        self._on_start, self._on_done = on_start, on_done
        self.queue: OrderedDict[Request, PrefillJob] = OrderedDict()
        """Jobs that wait, the running one not among them."""
        self._queued_ns = 0
        self._running: PrefillJob | None = None
        self._started_at_ns = self._stalled_at_ns = 0
        self._life = 0
        self.is_stalled = False
        self._ending: Action = self._done

    def submit(self, job: PrefillJob) -> None:
        """Queue a job, and start it when nothing runs."""
        self.queue[job.request] = job
        self._queued_ns += job.chunks[-1][1]
        self._start_next()

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue, the running one not counted."""
        return len(self.queue)

    @property
    def is_busy(self) -> bool:
        """Return True if a job runs."""
        return self._running is not None

    @property
    def queued_ns(self) -> int:
        """Work of the jobs in the queue, ns."""
        return self._queued_ns

    def withdraw(self, request: Request) -> None:
        """Remove a request's job from the queue; a running job runs to its end."""
        job = self.queue.pop(request, None)
        if job is not None:
            self._queued_ns -= job.chunks[-1][1]

    def backlog_ns(self) -> int:
        """Work that is left, ns."""
        running = self._running
        if running is None:
            return self._queued_ns
        end_ns = self._started_at_ns + running.chunks[-1][1]
        return self._queued_ns + end_ns - self._clock.now_ns

    def fail(self) -> list[PrefillJob]:
        """Stop; the jobs that are lost, oldest first."""
        lost = ([self._running] if self._running else []) + list(self.queue.values())
        if self._running is not None:
            self.busy_ns += self._clock.now_ns - self._started_at_ns
            self._hold(self._running)
        self.queue.clear()
        self._queued_ns, self._running, self.up, self.answers = 0, None, False, False
        self._life += 1
        return lost

    def recover(self) -> None:
        """Work again."""
        self.up = self.answers = True
        if self.is_stalled:
            self.resume()

    def stall(self) -> None:
        """Take jobs, and get nowhere with any."""
        self.is_stalled, self._stalled_at_ns = True, self._clock.now_ns
        self._life += 1
        if self._running is not None:
            self._hold(self._running)

    def freeze(self) -> None:
        """Stall, and answer nothing: its queue is not reported either."""
        self.stall()
        self.answers = False

    def resume(self) -> None:
        """Go on after a stall; a job that no request waits for any more is dropped."""
        self.is_stalled = False
        job = self._running
        if job is not None and job.attempt != job.request.attempt:
            self.busy_ns += self._stalled_at_ns - self._started_at_ns
            self._running = None
        elif job is not None:
            worked_ns = self._stalled_at_ns - self._started_at_ns
            self._started_at_ns = self._clock.now_ns - worked_ns
            self._work(job, [each for each in job.chunks if each[1] > worked_ns] or job.chunks[-1:])
        self._start_next()

    def _start_next(self) -> None:
        if self._running is not None or not self.queue or self.is_stalled:
            return
        _, job = self.queue.popitem(False)
        self._queued_ns -= job.chunks[-1][1]
        self._running, self._started_at_ns = job, self._clock.now_ns
        self._on_start(job)
        self._work(job, job.chunks)

    def _work(self, job: PrefillJob, chunks: list[tuple[int, int]]) -> None:
        """Compute these chunks of a job, the last ones of it."""
        if job.transport is not None and len(chunks) > 1:
            job.transport.ship(job.request, chunks, self._started_at_ns)
        self._clock.at(self._started_at_ns + chunks[-1][1], self._ending, (self._life, job))

    def _hold(self, job: PrefillJob) -> None:
        if job.transport is not None and job.attempt == job.request.attempt:
            job.transport.hold(job.request)

    def _done(self, event: tuple[int, PrefillJob]) -> None:
        life, job = event
        if life != self._life:
            return
        if job.transport is not None and job.attempt == job.request.attempt:
            job.transport.finish(job.request)
        self.busy_ns += job.chunks[-1][1]
        self._running = None
        self._on_done(job)
        self._start_next()
