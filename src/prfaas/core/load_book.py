"""How long an instance's queue is, from what was sent, what was heard of it, and late reports.

Instances work first come first served. The gateway knows what it sent to an instance and hears when
a prefill ends; a report says how many requests waited there, which tells of work that others sent.
Together they give the instant the instance will be free. It orders instances the same way at every
later moment, so a heap keeps them sorted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

OUTDATED_RATIO_MAX = 3
"""Entries of the heap for each instance; then outdated ones are thrown out."""


@dataclass(slots=True)
class _Job:
    sent_at_ns: int
    work_ns: int


@dataclass(slots=True)
class _Load:
    observed_at_ns: int = 0
    free_at_ns: int = 0
    ready: bool = True
    version: int = 0
    jobs: dict[int, _Job] = field(default_factory=dict)
    work_ns: int = 0
    """Of all jobs."""
    mean_ns: int = 0
    """Of one job, as of the last that was sent."""
    foreign_ns: int = 0
    """Work that others sent, as of the last report."""
    ended: deque[tuple[int, int]] = field(default_factory=deque)
    """When a job was sent and when its end was heard of, for reports from before that."""


class LoadBook:
    """Predicted waits of a set of instances.

    Args:
        names: The instances.
        stale_after_ns: Age beyond which a report counts as unknown.
    """

    def __init__(self, names: list[str], stale_after_ns: int) -> None:
        self._stale_after_ns = stale_after_ns
        self.names = tuple(names)
        self._loads = {name: _Load() for name in names}
        self._order = [(0, name, 0) for name in names]
        heapq.heapify(self._order)

    def report(self, name: str, observed_at_ns: int, num_waiting: int) -> None:
        """So many requests waited at an instance at `observed_at_ns`; older reports are ignored.

        If fewer wait than this gateway had sent, the oldest of its own are through, although their
        end was not heard of. If more wait, others sent them, and they are taken to be as long as
        its own are on average.
        """
        load = self._loads[name]
        if observed_at_ns < load.observed_at_ns:
            return
        load.observed_at_ns = observed_at_ns
        while load.ended and load.ended[0][1] <= observed_at_ns:
            load.ended.popleft()
        if not (num_waiting or load.jobs or load.foreign_ns):
            return
        later = _sent_after(load, observed_at_ns)
        for _ in range(len(load.jobs) - len(later) - num_waiting - 1):
            load.work_ns -= load.jobs.pop(next(iter(load.jobs))).work_ns
        num_own = len(load.jobs) - len(later)
        num_own += sum(sent_at_ns <= observed_at_ns for sent_at_ns, _ in load.ended)
        before, load.foreign_ns = load.foreign_ns, max(0, num_waiting - num_own) * load.mean_ns
        if load.jobs or load.foreign_ns or before:
            # What is there began when what was before it ended.
            begun_ns = load.ended[-1][1] if load.ended else observed_at_ns
            there_ns = load.work_ns - sum(job.work_ns for job in later)
            most_ns = _after(begun_ns + there_ns, later)
            least_ns = _after(begun_ns + max(0, there_ns - _first_ns(load)), later)
            own_ns = min(max(load.free_at_ns - before, least_ns), most_ns)
            self._move(name, load, own_ns + load.foreign_ns)

    def dispatch(self, name: str, job: int, now_ns: int, work_ns: int) -> None:
        """The gateway sends a job that takes `work_ns` to an instance."""
        load = self._loads[name]
        start_ns = max(load.free_at_ns, now_ns + load.work_ns - _first_ns(load))
        load.jobs[job] = _Job(now_ns, work_ns)
        load.work_ns += work_ns
        load.mean_ns = load.work_ns // len(load.jobs)
        self._move(name, load, start_ns + work_ns)

    def done(self, name: str, job: int, now_ns: int) -> None:
        """The end of a job was heard of: those before it are over too, those behind begin now."""
        load = self._loads[name]
        while job in load.jobs:
            self._end(load, next(iter(load.jobs)), now_ns)
            self._move(name, load, now_ns + load.work_ns + load.foreign_ns)

    def drop(self, name: str, job: int, now_ns: int) -> None:
        """A job was given up: whatever it would have taken is free."""
        load = self._loads[name]
        if job in load.jobs:
            freed_ns = self._end(load, job, now_ns)
            self._move(name, load, max(load.free_at_ns - freed_ns, now_ns))

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance became healthy, with an empty queue, or stopped being so."""
        load = self._loads[name]
        if ready and not load.ready:
            load.foreign_ns, load.observed_at_ns = 0, now_ns
            load.free_at_ns = now_ns + load.work_ns
        load.ready = ready
        self._move(name, load, load.free_at_ns)

    def least(self) -> str | None:
        """The ready instance that is free first, by name among equals; None if none is ready.

        Costs O(log n) amortised over the updates.
        """
        while self._order:
            if self._is_current(self._order[0]):
                return self._order[0][1]
            heapq.heappop(self._order)
        return None

    def last(self, names: Iterable[str]) -> str | None:
        """The ready one of some instances that is free last, by name among equals."""
        ready = (name for name in names if self._loads[name].ready)
        return min(ready, key=lambda name: (-self._loads[name].free_at_ns, name), default=None)

    def in_order(self) -> Iterator[str]:
        """Ready instances, the one that is free first comes first. The book must not change.

        The first costs as much as `least`, each further one O(log n) plus the outdated entries
        that are passed over.
        """
        if self.least() is None:
            return
        heap = self._order
        yield heap[0][1]
        # Walks the heap without taking it apart: behind an entry come its two children.
        edge = [(heap[i], i) for i in (1, 2) if i < len(heap)]
        heapq.heapify(edge)
        while edge:
            entry, index = heapq.heappop(edge)
            if self._is_current(entry):
                yield entry[1]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(edge, (heap[child], child))

    def _is_current(self, entry: tuple[int, str, int]) -> bool:
        load = self._loads[entry[1]]
        return load.version == entry[2] and load.ready

    def wait_ns(self, name: str, now_ns: int) -> int | None:
        """Predicted wait of a request sent now; None when the last report is too old."""
        load = self._loads[name]
        if now_ns - load.observed_at_ns > self._stale_after_ns:
            return None
        return max(0, load.free_at_ns - now_ns)

    def num_jobs(self, name: str) -> int:
        """Jobs that this gateway sent to an instance and has not heard the end of."""
        return len(self._loads[name].jobs)

    def queued_ns(self, name: str) -> int:
        """Work that waits at an instance, what it works on left out."""
        load = self._loads[name]
        return load.work_ns - _first_ns(load) + load.foreign_ns

    def _end(self, load: _Load, name: int, now_ns: int) -> int:
        """A job is over; the work it stood for."""
        job = load.jobs.pop(name)
        load.work_ns -= job.work_ns
        load.ended.append((job.sent_at_ns, now_ns))
        while load.ended[0][1] < now_ns - self._stale_after_ns:
            load.ended.popleft()
        return job.work_ns

    def _move(self, name: str, load: _Load, free_at_ns: int) -> None:
        load.free_at_ns = free_at_ns
        load.version += 1
        if load.ready:
            heapq.heappush(self._order, (free_at_ns, name, load.version))
        if len(self._order) > OUTDATED_RATIO_MAX * (len(self._loads) + 8):
            self._order = [entry for entry in self._order if self._is_current(entry)]
            heapq.heapify(self._order)


def _sent_after(load: _Load, at_ns: int) -> list[_Job]:
    """Jobs that were sent after an instant, the oldest first."""
    later = []
    for job in reversed(load.jobs.values()):
        if job.sent_at_ns <= at_ns:
            break
        later.append(job)
    later.reverse()
    return later


def _after(free_at_ns: int, jobs: list[_Job]) -> int:
    """When an instance that is free at an instant has worked off further jobs."""
    for job in jobs:
        free_at_ns = max(free_at_ns, job.sent_at_ns) + job.work_ns
    return free_at_ns


def _first_ns(load: _Load) -> int:
    """Work of the first job, which may be nearly over."""
    first = next(iter(load.jobs.values()), None)
    return 0 if first is None else first.work_ns
