"""Threads for tokenising, each bound to one tenant.

`fastokens` keeps a word cache in every thread that calls it. Threads that tenants share would let
one measure which words another one has sent. A thread here serves one tenant only; to serve another
tenant it is ended, and its cache with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS_MAX = 8
"""Threads of all tenants. A thread's cache takes about 20 MB with a vocabulary of 150,000."""
THREADS_EACH = 2
"""Threads of one tenant. Its further work waits for its own threads, not for a core."""
T = TypeVar("T")


class _Thread:
    """One thread, bound to `tenant` from its start to its end."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")


class TenantThreads:
    """Runs work on threads of the tenant it is for. Every call comes from one event loop.

    Args:
        threads_max: Threads of all tenants, at least 1.
        threads_each: Threads of one tenant, at least 1.
    """

    def __init__(self, threads_max: int = THREADS_MAX, threads_each: int = THREADS_EACH) -> None:
        self._threads_max, self._threads_each = threads_max, threads_each
        self._idle: OrderedDict[_Thread, None] = OrderedDict()
        self._num_busy: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[_Thread]]] = {}

    @property
    def num_threads(self) -> int:
        """Threads that there are."""
        return len(self._idle) + self._num_busy.total()

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(
        self, tenant: str, work: Callable[[], T], on_end: Callable[[Future[T]], None] | None = None
    ) -> T:
        """Run `work` on a thread of `tenant`, once one is free.

        Work that has begun continues when its caller is cancelled; its thread is busy until it
        ends.

        Args:
            on_end: Called on the event loop when work that has begun ends, before its caller
                continues, and also if that was cancelled.
        """
        thread = await self._acquire(tenant)
        loop = asyncio.get_running_loop()

        def end(done: Future[T]) -> None:
            self._release(thread)
            if on_end is not None and not done.cancelled():
                on_end(done)

        def ended(done: Future[T]) -> None:
            # A loop that is closed has nobody who waits.
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, done)

        begun = thread.executor.submit(work)
        begun.add_done_callback(ended)
        return await asyncio.wrap_future(begun)

    def close(self) -> None:
        """Stop the threads once they are idle."""
        for thread in self._idle:
            thread.executor.shutdown(wait=False)
        self._idle.clear()

    async def _acquire(self, tenant: str) -> _Thread:
        # Those that were cancelled leave by themselves, a moment later.
        queue = self._waiting.get(tenant, ())
        if all(turn.done() for turn in queue) and (thread := self._free(tenant)):
            return thread
        turn: asyncio.Future[_Thread] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            else:
                self._leave(tenant, turn)
            raise

    def _free(self, tenant: str) -> _Thread | None:
        """A thread for a tenant, then busy: an idle one of its own, or a new one."""
        if self._num_busy[tenant] >= self._threads_each:
            return None
        thread = next((t for t in reversed(self._idle) if t.tenant == tenant), None)
        if thread is not None:
            del self._idle[thread]
        elif self._num_busy.total() >= self._threads_max:
            return None
        else:
            if self.num_threads >= self._threads_max:
                oldest, _ = self._idle.popitem(last=False)
                oldest.executor.shutdown(wait=False)
            thread = _Thread(tenant)
        self._num_busy[tenant] += 1
        return thread

    def _release(self, thread: _Thread) -> None:
        self._num_busy[thread.tenant] -= 1
        if not self._num_busy[thread.tenant]:
            del self._num_busy[thread.tenant]
        self._idle[thread] = None
        # Whoever has the fewest threads comes first, then whoever has waited longest.
        for tenant in sorted(self._waiting, key=lambda name: self._num_busy.get(name, 0)):
            # A cancelled waiter leaves by itself, a moment later.
            turn = next((turn for turn in self._waiting[tenant] if not turn.done()), None)
            if turn is not None and (found := self._free(tenant)):
                self._leave(tenant, turn)
                turn.set_result(found)
                return

    def _leave(self, tenant: str, turn: asyncio.Future[_Thread]) -> None:
        turns = self._waiting[tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]
