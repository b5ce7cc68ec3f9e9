"""Tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended; what they raise is dropped."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


@asynccontextmanager
async def slot_of(slots: asyncio.Semaphore, longest_s: float) -> AsyncIterator[None]:
    """Hold one of a number of slots; a body that takes longer goes on without its slot.

    Args:
        slots: Shared by all that take turns.
        longest_s: Time after which the slot is free for another one, seconds.
    """
    await slots.acquire()
    held = [slots]

    def release() -> None:
        while held:
            held.pop().release()

    timer = asyncio.get_running_loop().call_later(longest_s, release)
    try:
        yield
    finally:
        timer.cancel()
        release()
