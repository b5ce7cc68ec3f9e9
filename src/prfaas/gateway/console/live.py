"""The state of this moment, read once for all who follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LiveState:
    """The state as an event, at most one reading an interval however many pages are open.

    Nothing is read while nobody follows. Who is slow gets the newest and misses what lay between.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self._event = b""
        """Empty when it is of an earlier interval and nobody followed."""
        self._number = 0
        self._fresh = asyncio.Event()
        self.num_followers = 0
        """Pages that are open."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count a follower for as long as it stays."""
        self.num_followers += 1
        try:
            yield
        finally:
            self.num_followers -= 1

    def beat(self) -> None:
        """The next interval begins."""
        self._event = b""
        if self.num_followers:
            self._publish()

    async def after(self, number: int) -> tuple[int, bytes]:
        """The newest event with its number, once that is beyond `number`; 0 is before all."""
        if not self._event:
            self._publish()
        while self._number <= number:
            await self._fresh.wait()
        return self._number, self._event

    def _publish(self) -> None:
        self._event = self._read()
        self._number += 1
        self._fresh.set()
        self._fresh = asyncio.Event()
