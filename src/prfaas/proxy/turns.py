"""Turns: requests wait for `EngineQueue`, which decides without a clock, on an event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prfaas.core.admission.contracts import Contract
from prfaas.core.sharing.engine_queue import EngineQueue, QueueRefusal
from prfaas.units import NS_PER_S


class TurnRefusedError(Exception):
    """A request may not wait; `why` has the reason."""

    def __init__(self, why: QueueRefusal) -> None:
        super().__init__(why.value)
        self.why = why


@dataclass(slots=True)
class EngineTurn:
    """A request that an engine has.

    Attributes:
        waited_ns: Time in the queue.
        computed: Tokens that the engine computed; None without an answer.
    """

    waited_ns: int
    computed: int | None = None


class Turns:
    """Hands out turns at engines.

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
        """Wait for a turn, and keep it until the end of the block.

        Args:
            can_wait: See `EngineQueue.ask`.

        Raises:
            TurnRefusedError: The site may have no more requests.
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
