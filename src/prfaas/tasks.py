"""Tasks of an event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended; what they raise is dropped."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class Backoff:
    """Pauses before new attempts, each twice as long as the last.

    Jitter spreads the processes that lost something at the same moment.

    Args:
        least_s: The first pause, seconds.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self.next_s = least_s
        """The next pause, without jitter."""

    def reset(self) -> None:
        """An attempt succeeded: the next pause is the first one again."""
        self.next_s = self._least_s

    async def pause(self) -> None:
        """Wait before the next attempt."""
        await asyncio.sleep(self.next_s * random.uniform(0.5, 1.0))  # noqa: S311
        self.next_s = min(2 * self.next_s, self._most_s)


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
