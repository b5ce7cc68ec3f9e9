"""Queue of an instance, from sent work, observed ends, and delayed reports.

Instances work first come first served. The gateway knows what it sent to an instance and hears when
a prefill ends; a report says how many requests waited there, which tells of work that others sent.
Together they give the instant the instance will be free. It orders instances the same way at every
later moment, so a sorted list has to be mended only where one of them changes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from prfaas.core.invariants import hold
from prfaas.records import MutableRecord

WAITING_MAX = 256
"""Jobs of a queue that are listed; those behind them will not start soon."""


class WorkAhead(NamedTuple):
    """Work of an instance up to the end of a job, ns."""

    own_ns: int
    work_ns: int
    """Its own, and of those before it."""
    first_ns: int
    """Of the first of them, which runs."""
    spent_ns: int
    """Time since that one began."""


_Place = tuple[int, str]
"""Time at which an instance is free, and its name."""


class _Job(MutableRecord):
    sent_at_ns: int
    work_ns: int


@dataclass(slots=True, eq=False)
class _Load:
    name: str
    observed_at_ns: int = 0
    free_at_ns: int = 0
    ready: bool = True
    jobs: dict[int, _Job] = field(default_factory=dict)
    work_ns: int = 0
    """Work of all jobs."""
    mean_ns: int = 0
    """Work of one job, from the last one sent."""
    sent_at_ns: int = 0
    """Time at which the last job was sent."""
    foreign_ns: int = 0
    """Work that others sent, as of the last report."""
    begun_at_ns: int = 0
    """Start of the first job, as far as is known."""
    ended: deque[tuple[int, int]] = field(default_factory=deque)
    """Times of sends and ends of jobs, for older reports."""


class InstanceLoad:
    """Predicted waits of a set of instances.

    Args:
        stale_after_ns: Age beyond which a report counts as unknown.
        by_open: Keep instances with as many requests to decode together, too.
    """

    def __init__(self, names: list[str], stale_after_ns: int, *, by_open: bool = False) -> None:
        self._stale_after_ns, self._by_open = stale_after_ns, by_open
        self._loads = {name: _Load(name) for name in names}
        self.num_open = dict.fromkeys(names, 0)
        """Requests that each instance decodes or will decode; to be read only."""
        self.order = sorted((0, name) for name in names)
        """Ready instances, behind the time at which each is free; to be read only."""
        self.levels = [self.order[:] if by_open else self.order]
        """The same of those with each number of requests to decode, or of all together."""

    def add(self, name: str) -> None:
        """Add an instance, which is not ready."""
        self._loads[name], self.num_open[name] = _Load(name, ready=False), 0

    def remove(self, name: str, now_ns: int) -> None:
        """Forget an instance that has no jobs."""
        self.set_ready(name, ready=False, now_ns=now_ns)
        del self._loads[name], self.num_open[name]

    def enter(self, name: str, change: int = 1) -> None:
        """An instance has one more request to decode; -1 is one less."""
        load = self._loads[name]
        if self._by_open and load.ready:
            place = load.free_at_ns, name
            _take(self._level(name), place)
            self.num_open[name] += change
            insort(self._level(name), place)
            if not self.levels[-1]:
                self.levels.pop()
        else:
            self.num_open[name] += change

    def report(self, name: str, observed_at_ns: int, num_waiting: int) -> None:
        """Report the requests that waited at an instance at `observed_at_ns`; older reports are
        ignored.

        If fewer wait than this gateway had sent, the oldest of its own are through, although their
        end was not heard of. If more wait, others sent them, and they are taken to be as long as
        its own are on average.
        """
        load = self._loads[name]
        if observed_at_ns < load.observed_at_ns:
            return
        load.observed_at_ns = observed_at_ns
        ended = load.ended
        while ended and ended[0][1] <= observed_at_ns:
            ended.popleft()
        if load.jobs:
            is_new = (
                num_waiting != len(load.jobs) - 1
                or load.foreign_ns
                or ended
                or load.sent_at_ns > observed_at_ns
            )
            left_ns = load.free_at_ns - observed_at_ns
            # Its own are all there, and the first of them may be anywhere between start and end.
            if is_new or not load.work_ns - _first_ns(load) <= left_ns <= load.work_ns:
                self._compare(load, observed_at_ns, num_waiting)
        elif num_waiting or load.foreign_ns:
            self._compare(load, observed_at_ns, num_waiting)

    def dispatch(self, name: str, job: int, now_ns: int, work_ns: int) -> None:
        """The gateway sends a job that takes `work_ns` to an instance."""
        load = self._loads[name]
        start_ns = max(load.free_at_ns, now_ns + load.work_ns - _first_ns(load))
        if not load.jobs:
            load.begun_at_ns = now_ns
        load.jobs[job] = _Job(now_ns, work_ns)
        load.work_ns += work_ns
        load.sent_at_ns, load.mean_ns = now_ns, load.work_ns // len(load.jobs)
        self._move(load, start_ns + work_ns)

    def done(self, name: str, job: int, now_ns: int) -> int | None:
        """Record the end of a job: those before it are over too, the one behind it begins now.

        Returns:
            The job that begins; None without one, or when the end was known before.
        """
        load = self._loads[name]
        if job not in load.jobs:
            return None
        while job in load.jobs and (first := _first(load.jobs)) is not None:
            self._end(load, first, now_ns)
        self._move(load, now_ns + load.work_ns + load.foreign_ns)
        return _first(load.jobs)

    def waiting(self, name: str, num_waiting: int) -> list[int]:
        """Return jobs of this gateway that wait at an instance, in order of dispatch; returns the
        first `WAITING_MAX` of them.

        Args:
            num_waiting: Requests that a report found waiting, of anybody.
        """
        jobs = self._loads[name].jobs
        first = max(1, len(jobs) - num_waiting)
        return list(islice(jobs, first, first + WAITING_MAX))

    def rework(self, name: str, job: int, now_ns: int, work_ns: int) -> bool:
        """Replace the work of a job that has not ended; return True if it changed."""
        load = self._loads[name]
        booked = load.jobs.get(job)
        if booked is None or booked.work_ns == work_ns:
            return False
        changed_ns = work_ns - booked.work_ns
        booked.work_ns = work_ns
        load.work_ns += changed_ns
        load.mean_ns = load.work_ns // len(load.jobs)
        self._move(load, max(load.free_at_ns + changed_ns, now_ns))
        return True

    def drop(self, name: str, job: int, now_ns: int) -> None:
        """A job was aborted: whatever it would have taken is free."""
        load = self._loads[name]
        if job in load.jobs:
            freed_ns = self._end(load, job, now_ns)
            self._move(load, max(load.free_at_ns - freed_ns, now_ns))

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance became healthy, with an empty queue, or stopped being so."""
        load = self._loads[name]
        if ready == load.ready:
            return
        if ready:
            load.foreign_ns, load.observed_at_ns = 0, now_ns
            load.free_at_ns = now_ns + load.work_ns
        change, place = insort if ready else _take, (load.free_at_ns, name)
        change(self.order, place)
        if self._by_open:
            change(self._level(name), place)
        load.ready = ready

    def last(self, names: Iterable[str], free_at_ns_max: int) -> str | None:
        """The ready one of some instances that is free last, by name among equals.

        Those that are free only after `free_at_ns_max` are left out.
        """
        loads = self._loads
        ready = (n for n in names if loads[n].ready and loads[n].free_at_ns <= free_at_ns_max)
        return min(ready, key=lambda name: (-self._loads[name].free_at_ns, name), default=None)

    def first(self, now_ns: int) -> tuple[str, int | None] | None:
        """The ready instance that is free first, by name among equals, and its wait; None if none
        is ready."""
        if not self.order:
            return None
        free_at_ns, name = self.order[0]
        if self._loads[name].observed_at_ns < now_ns - self._stale_after_ns:
            return name, None
        return name, free_at_ns - now_ns if free_at_ns > now_ns else 0

    def in_order(self, now_ns: int) -> Iterator[tuple[str, int | None]]:
        """Ready instances and their waits, the one that is free first comes first.

        The book must not change meanwhile.
        """
        loads, fresh_ns = self._loads, now_ns - self._stale_after_ns
        for free_at_ns, name in self.order:
            if loads[name].observed_at_ns < fresh_ns:
                yield name, None
            else:
                yield name, free_at_ns - now_ns if free_at_ns > now_ns else 0

    def places(self, names: Iterable[str]) -> list[tuple[int, str]]:
        """The ready ones of some instances, in order, behind the time at which each is free."""
        loads = self._loads
        return sorted((loads[name].free_at_ns, name) for name in names if loads[name].ready)

    def wait_ns(self, name: str, now_ns: int) -> int | None:
        """Predicted wait of a request sent now; None when the last report is too old."""
        load = self._loads[name]
        if now_ns - load.observed_at_ns > self._stale_after_ns:
            return None
        return max(0, load.free_at_ns - now_ns)

    def ahead(self, name: str, job: int, now_ns: int) -> WorkAhead | None:
        """Work up to the end of a job; None if it is not there. O(jobs)."""
        load, work_ns = self._loads[name], 0
        if job not in load.jobs:
            return None
        for number, each in load.jobs.items():
            work_ns += each.work_ns
            if number == job:
                break
        own_ns = load.jobs[job].work_ns
        return WorkAhead(own_ns, work_ns, _first_ns(load), max(0, now_ns - load.begun_at_ns))

    @property
    def num_ready(self) -> int:
        """Instances that are ready."""
        return len(self.order)

    def num_jobs(self, name: str) -> int:
        """Jobs that this gateway sent to an instance without an observed end."""
        return len(self._loads[name].jobs)

    def pending_ns(self, name: str) -> int:
        """Work that an instance has and has not ended, what it works on counted whole."""
        load = self._loads[name]
        return load.work_ns + load.foreign_ns

    def queued_ns(self, name: str) -> int:
        """Work that waits at an instance, what it works on left out."""
        load = self._loads[name]
        return load.work_ns - _first_ns(load) + load.foreign_ns

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        loads = self._loads.values()
        hold(
            work_is_the_sum_of_the_jobs=all(
                load.work_ns == sum(job.work_ns for job in load.jobs.values()) for load in loads
            ),
            the_order_has_the_ready_ones=self.order
            == sorted((load.free_at_ns, load.name) for load in loads if load.ready),
            the_levels_have_the_order=[place for level in self.levels for place in level]
            == (
                sorted(self.order, key=lambda place: self.num_open[place[1]])
                if self._by_open
                else self.order
            ),
            open_requests_are_counted=self.num_open.keys() == self._loads.keys()
            and all(num >= 0 for num in self.num_open.values()),
            no_work_is_negative=all(load.foreign_ns >= 0 <= load.work_ns for load in loads),
        )

    def _compare(self, load: _Load, observed_at_ns: int, num_waiting: int) -> None:
        """A report against what is known."""
        jobs, ended = load.jobs, load.ended
        later = _sent_after(load, observed_at_ns) if load.sent_at_ns > observed_at_ns else ()
        num_own = len(jobs) - len(later)
        while num_own > num_waiting + 1:
            load.work_ns -= jobs.pop(next(iter(jobs))).work_ns
            load.begun_at_ns = observed_at_ns
            num_own -= 1
        there_ns = load.work_ns
        for sent_at_ns, _ in ended:
            num_own += sent_at_ns <= observed_at_ns
        for job in later:
            there_ns -= job.work_ns
        before, foreign_ns = load.foreign_ns, 0
        if num_waiting > num_own:
            foreign_ns = (num_waiting - num_own) * load.mean_ns
        load.foreign_ns = foreign_ns
        if jobs or foreign_ns or before:
            # What is there began when what was before it ended.
            begun_ns = load.begun_at_ns if ended else observed_at_ns
            most_ns = begun_ns + there_ns
            if later:
                most_ns = _after(most_ns, later)
            free_at_ns = load.free_at_ns - before
            if free_at_ns >= most_ns:
                free_at_ns = most_ns
            elif later:
                least_ns = begun_ns + max(0, there_ns - _first_ns(load))
                free_at_ns = max(free_at_ns, _after(least_ns, later))
            elif free_at_ns < (least_ns := begun_ns + there_ns - _first_ns(load)):
                free_at_ns = least_ns
            if free_at_ns + foreign_ns != load.free_at_ns:
                self._move(load, free_at_ns + foreign_ns)

    def _end(self, load: _Load, name: int, now_ns: int) -> int:
        """A job is over; the work it stood for."""
        if _first(load.jobs) == name:
            load.begun_at_ns = now_ns
        job, ended = load.jobs.pop(name), load.ended
        load.work_ns -= job.work_ns
        ended.append((job.sent_at_ns, now_ns))
        while ended[0][1] < now_ns - self._stale_after_ns:
            ended.popleft()
        return job.work_ns

    def _move(self, load: _Load, free_at_ns: int) -> None:
        if load.ready and free_at_ns != load.free_at_ns:
            before, now = (load.free_at_ns, load.name), (free_at_ns, load.name)
            _take(self.order, before)
            insort(self.order, now)
            if self._by_open:
                level = self._level(load.name)
                _take(level, before)
                insort(level, now)
        load.free_at_ns = free_at_ns

    def _level(self, name: str) -> list[_Place]:
        """Ready instances with as many requests to decode."""
        levels, num_open = self.levels, self.num_open[name]
        while len(levels) <= num_open:
            levels.append([])
        return levels[num_open]


def _take(places: list[_Place], place: _Place) -> None:
    """Take a place out of its order."""
    places.pop(bisect_left(places, place))


def _sent_after(load: _Load, at_ns: int) -> list[_Job]:
    """Jobs that were sent after an instant, the oldest first."""
    later = []
    for job in reversed(load.jobs.values()):
        if job.sent_at_ns <= at_ns:
            break
        later.append(job)
    later.reverse()
    return later


def _after(free_at_ns: int, jobs: Sequence[_Job]) -> int:
    """Time at which an instance that is free at a time has completed further jobs."""
    for job in jobs:
        free_at_ns = max(free_at_ns, job.sent_at_ns) + job.work_ns
    return free_at_ns


def _first(jobs: dict[int, _Job]) -> int | None:
    """Job that was sent first."""
    for number in jobs:
        return number
    return None


def _first_ns(load: _Load) -> int:
    """Work of the first job, which may be nearly over."""
    for job in load.jobs.values():
        return job.work_ns
    return 0
