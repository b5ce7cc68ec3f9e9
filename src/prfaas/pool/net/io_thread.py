"""The thread that moves the bytes of blocks, with its own event loop.

All data connections of a pool node run here, so that no thread waits for the interpreter lock at
every TLS record, and the node's own loop stays free for messages. Digests are compared on a second
thread: hashing needs no lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from prfaas.tasks import cancel_all


class IoThread:
    """Starts with the first thing it is given to do."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="prfaas-digest")
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def thread_id(self) -> int | None:
        """Native id of the thread; None before it has begun."""
        return self._thread.native_id if self._thread is not None else None

    def call(self, what: Callable[..., object], *about: object) -> bool:
        """Have something done on the thread; False if it has ended. Any thread may ask, but the
        first one alone."""
        if self._is_closed:
            return False
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run, args=[self._loop], name="prfaas-io", daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(what, *about)
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

    def hash(self, work: Callable[[], None]) -> None:
        """Run a function over many bytes on the thread for digests."""
        self._hashing.submit(work)

    async def close(self) -> None:
        """Cancel running work and wait until both threads have ended."""
        if self._loop is not None and not self._is_closed:
            self.call(lambda: asyncio.ensure_future(self._cancel_all()))
            self._is_closed = True
            if self._thread is not None:
                await asyncio.to_thread(self._thread.join)
        self._is_closed = True
        await asyncio.to_thread(self._hashing.shutdown)

    async def _cancel_all(self) -> None:
        await cancel_all(self._tasks)
        asyncio.get_running_loop().stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
