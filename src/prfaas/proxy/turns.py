"""Turns: bodies of prefills are held and read within limits, and wait for `EngineQueue`.

Too many bodies of a site are refused unread. The queue decides without a clock; here is the event
loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from prfaas.core.admission.contracts import Contract
from prfaas.core.invariants import check_invariants
from prfaas.core.sharing.engine_queue import EngineQueue, QueueRefusal
from prfaas.units import NS_PER_S

BODY_BYTES_MAX = 32 << 20
HELD_BYTES_MAX = 256 << 20
"""Bodies of one site that come, wait or run, together."""
REFUSED_BYTES_PER_S = 4 << 20
"""Rate of bodies of one site that are read and then refused."""
SMALL_BYTES = 64 << 10
"""A body up to this costs no more than its refusal would."""


class TurnRefusedError(Exception):
    """A request may not wait; `why` has the reason."""

    def __init__(self, why: QueueRefusal) -> None:
        super().__init__(why.value)
        self.why = why


@dataclass(slots=True)
class EngineTurn:
    """A request that an engine has."""

    waited_ns: int
    """Time in the queue."""
    computed: int | None = None
    """Tokens that the engine computed; None without an answer."""


class Turns:
    """Hands out turns at engines, for the ports of all of them.

    Args:
        slots: Requests that each engine gets at a time.
    """

    def __init__(
        self, slots: Mapping[str, int], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.queue = EngineQueue(slots)
        self._clock_ns = clock_ns
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Task[object]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._paid_at_ns: dict[str, int] = {}
        """Instant from which a site may have a long body read again."""
        self._held_bytes = Counter[str]()
        self.coming: dict[str, Counter[str]] = {}
        """Bodies that are being read, by site and engine."""

    def validate(self) -> None:
        """Check what has to hold whenever nothing is being done; AssertionError if it does not."""
        coming = [num for each in self.coming.values() for num in each.values()]
        held = list(self._held_bytes.values())
        check_invariants(
            [
                (
                    "a request runs that nobody asked for",
                    self._running.keys() <= self._waiting.keys(),
                ),
                ("a body ended that never began", min([*coming, *held], default=0) >= 0),
                (f"sites hold {held} bytes", max(held, default=0) <= HELD_BYTES_MAX),
            ]
        )

    @contextmanager
    def hold(self, site: str, num_bytes: int) -> Iterator[None]:
        """Hold a body until the end of the block.

        Raises:
            TurnRefusedError: It is too long, the site has too many bytes here, or too many of its
                bodies were refused.
        """
        if num_bytes > SMALL_BYTES and self._paid_at_ns.get(site, 0) > self._clock_ns():
            raise TurnRefusedError(QueueRefusal.REFUSALS)
        if num_bytes > BODY_BYTES_MAX or self._held_bytes[site] + num_bytes > HELD_BYTES_MAX:
            raise TurnRefusedError(QueueRefusal.MEMORY)
        self._held_bytes[site] += num_bytes
        try:
            yield
        finally:
            self._held_bytes[site] -= num_bytes

    def refused(self, site: str, num_bytes: int) -> None:
        """A body of a site was read in vain."""
        since_ns = max(self._paid_at_ns.get(site, 0), self._clock_ns())
        self._paid_at_ns[site] = since_ns + num_bytes * NS_PER_S // REFUSED_BYTES_PER_S

    @contextmanager
    def read(self, site: str, engine: str) -> Iterator[None]:
        """Read a body in the block; TurnRefusedError if the site may have no more requests, with
        those whose bodies come."""
        coming = self.coming.setdefault(site, Counter())
        coming[engine] += 1
        try:
            if (why := self.queue.refuses(site, coming)) is not None:
                raise TurnRefusedError(why)
            yield
        finally:
            coming[engine] -= 1

    def agree(self, contracts: Iterable[Contract]) -> None:
        """Put contracts in force; requests of sites without one end."""
        for job in self.queue.agree(contracts):
            if (turn := self._waiting.get(job)) is not None and not turn.done():
                turn.set_exception(TurnRefusedError(QueueRefusal.NO_CONTRACT))
            elif (task := self._running.get(job)) is not None:
                task.cancel()
        self._start()

    @asynccontextmanager
    async def turn(
        self, site: str, engine: str, tokens: int, *, can_wait: bool = False
    ) -> AsyncIterator[EngineTurn]:
        """Wait for a turn, and keep it until the end of the block; TurnRefusedError if the site may
        have no more requests.

        Args:
            can_wait: See `EngineQueue.ask`.
        """
        job, asked_ns = next(self._numbers), self._clock_ns()
        if (why := self.queue.ask(job, site, engine, tokens, can_wait=can_wait)) is not None:
            raise TurnRefusedError(why)
        self._waiting[job] = begun = asyncio.get_running_loop().create_future()
        turn: EngineTurn | None = None
        try:
            self._start()
            await begun
            turn = EngineTurn(self._clock_ns() - asked_ns)
            if (task := asyncio.current_task()) is not None:
                self._running[job] = task
            yield turn
        finally:
            self._waiting.pop(job, None)
            self._running.pop(job, None)
            self.queue.leave(job, turn.computed if turn is not None else None, self._clock_ns())
            self._start()

    def _start(self) -> None:
        now_ns = self._clock_ns()
        for job in self.queue.start(now_ns):
            begun = self._waiting[job]
            if not begun.done():
                begun.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (wait_ns := self.queue.wait_ns(now_ns)) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_ns / NS_PER_S + 0.001, self._start)
