"""The threads that move the bytes of blocks, each with its own event loop: the lanes of a node.

Data connections run here, so that the node's own loop stays free for messages. With TLS all are on
the first lane: threads would wait for the interpreter lock at every TLS record. Sealed connections
are spread over the lanes: sealing, opening, sending and receiving a fragment are a call each, and
none of them holds the lock. Digests are compared on further threads, or on a lane that waits for
bytes anyway: hashing needs no lock either.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_S


class Lane:
    """One thread. Starts with the first thing it is given to do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def thread_id(self) -> int | None:
        """Native id of the thread; None before it has begun."""
        return self._thread.native_id if self._thread is not None else None

    def call(self, what: Callable[..., object], *about: object) -> bool:
        """Have something done on the thread; False if it has ended. Any thread may ask."""
        if self._is_closed:
            return False
        if self._loop is None:
            self._begin()
        loop = self._loop
        if loop is None:
            return False
        loop.call_soon_threadsafe(what, *about)
        return True

    @property
    def has_failed(self) -> bool:
        """True if the thread has ended without a close."""
        thread = self._thread
        return thread is not None and not self._is_closed and not thread.is_alive()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Begin a task. On the thread only."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self) -> None:
        """Cancel running work and wait until the thread has ended."""
        if self._loop is not None and not self._is_closed:
            self.call(lambda: asyncio.ensure_future(self._cancel_all()))
            self._is_closed = True
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join)
        self._is_closed = True

    def _begin(self) -> None:
        with self._starting:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=[loop], name=self._name, daemon=True
                )
                self._thread.start()
                self._loop = loop

    async def _cancel_all(self) -> None:
        await cancel_all(self._tasks)
        asyncio.get_running_loop().stop()


class IoThread(Lane):
    """The first lane of a node, and what it has of further ones.

    Args:
        num_lanes: Threads for sealed data connections, this one included.
    """

    def __init__(self, num_lanes: int = 1) -> None:
        super().__init__("prfaas-io")
        further = [Lane(f"prfaas-io-{number}") for number in range(1, num_lanes)]
        self.lanes: list[Lane] = [self, *further]
        """All lanes, this one first."""
        self._next = itertools.cycle(self.lanes)
        self._hashing = ThreadPoolExecutor(num_lanes, thread_name_prefix="prfaas-digest")

    @property
    def has_failed(self) -> bool:
        """True if a lane has ended without a close."""
        return super().has_failed or any(lane.has_failed for lane in self.lanes[1:])

    def take_lane(self) -> Lane:
        """Return a lane for a connection: each in turn."""
        return next(self._next)

    def hash(self, work: Callable[[], None]) -> None:
        """Run a function over many bytes on a thread for digests."""
        self._hashing.submit(work)

    async def close(self) -> None:
        """Cancel running work and wait until all threads have ended."""
        for lane in self.lanes:
            await lane.end()
        await asyncio.to_thread(self._hashing.shutdown)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


SAMPLE_NS_MIN = NS_PER_S // 25
"""Shorter spans measure the scheduler more than the thread."""


class BusyMeter:
    """Share of time that a lane needs a core: it runs, or waits for one.

    Linux counts for each thread the nanoseconds it ran and those it waited in a run queue
    (`Documentation/scheduler/sched-stats.rst`); a kernel without the second counts the first.

    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._last = 0, 0
        self._share = 0.0

    def share(self) -> float:
        """Return the share of time, in [0, 1], since the call before; 0 if it is not known."""
        now, needed = time.monotonic_ns(), self._needed_ns()
        before, needed_before = self._last
        if needed is None:
            return 0.0
        if now - before >= SAMPLE_NS_MIN:
            if before:
                self._share = max(0.0, min(1.0, (needed - needed_before) / (now - before)))
            self._last = now, needed
        return self._share

    def _needed_ns(self) -> int | None:
        number = self._lane.thread_id
        if number is None:
            return None
        try:
            opened = os.open(f"/proc/self/task/{number}/schedstat", os.O_RDONLY)
            try:
                ran, waited = os.read(opened, 64).split()[:2]
            finally:
                os.close(opened)
            return int(ran) + int(waited)
        except (OSError, ValueError):
            return None
