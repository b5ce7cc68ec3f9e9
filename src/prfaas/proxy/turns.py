"""Turns: requests wait for `EngineQueue`, which decides without a clock, on an event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prfaas.core.sharing.contracts import Contract
from prfaas.core.sharing.engine_queue import EngineQueue, Why
from prfaas.units import NS_PER_S

SMOOTHING = 0.1
"""Weight of the latest request in the average speed of an engine."""


class TurnRefusedError(Exception):
    """A request may not wait; `why` has the reason."""

    def __init__(self, why: Why) -> None:
        super().__init__(why.value)
        self.why = why


@dataclass(slots=True)
class Turn:
    """A request that an engine has.

    Attributes:
        waited_ns: Time in the queue.
        computed: Tokens that it cost; None until the answer is known.
        held_ns: Time at the engine, once it has ended.
    """

    waited_ns: int
    computed: int | None = None
    held_ns: int = 0


class Turns:
    """Hands out turns at engines.

    Args:
        slots: Requests that each engine gets at a time.
        clock_ns: Monotonic clock.
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
        self._tokens_per_s: dict[str, float] = {}
        """Speed of each engine, for one request."""

    def agree(self, contracts: Iterable[Contract]) -> None:
        """Put contracts in force; requests of sites without one end."""
        for job in self.queue.agree(contracts):
            if (turn := self._waiting.get(job)) is not None and not turn.done():
                turn.set_exception(TurnRefusedError(Why.NO_CONTRACT))
            elif (task := self._running.get(job)) is not None:
                task.cancel()
        self._start()

    @asynccontextmanager
    async def turn(
        self, site: str, engine: str, tokens: int, *, waits: bool = False
    ) -> AsyncIterator[Turn]:
        """Wait for a turn, and keep it until the end of the block.

        Args:
            site: Whose request it is.
            engine: For which engine.
            tokens: Of the prompt.
            waits: The engine may wait before it computes: then the time counts too.

        Raises:
            TurnRefusedError: The site may have no more requests.
        """
        job, asked_ns = next(self._numbers), self._clock_ns()
        if (why := self.queue.ask(job, site, engine, tokens)) is not None:
            raise TurnRefusedError(why)
        self._waiting[job] = begun = asyncio.get_running_loop().create_future()
        turn: Turn | None = None
        try:
            self._start()
            await begun
            turn = Turn(self._clock_ns() - asked_ns)
            if (task := asyncio.current_task()) is not None:
                self._running[job] = task
            began_ns = self._clock_ns()
            try:
                yield turn
            finally:
                turn.held_ns = self._clock_ns() - began_ns
        finally:
            self._waiting.pop(job, None)
            self._running.pop(job, None)
            if turn is not None:
                self._charge(engine, turn, waits=waits)
            self.queue.leave(job, turn.computed if turn is not None else None, self._clock_ns())
            self._start()

    def _charge(self, engine: str, turn: Turn, *, waits: bool) -> None:
        """Charge a request that kept a slot without computing by the time, else learn the speed."""
        if turn.computed is None:
            return
        held_s, known = turn.held_ns / NS_PER_S, self._tokens_per_s.get(engine)
        if waits:
            turn.computed = max(turn.computed, int(held_s * (known or 0)))
        elif turn.computed and held_s:
            speed = turn.computed / held_s
            self._tokens_per_s[engine] = (
                speed if known is None else known + SMOOTHING * (speed - known)
            )

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
