"""Keepers: each starts one part, watches it, and restarts it.

```
            started            answers                misses MISSES_MAX probes
  WAITING ----------> STARTING --------> READY <--------------------------------> UNHEALTHY
     ^                  |  |               |              answers again             |
     |                  |  | start_timeout,|                                        |
     |                  |  | first request | restart asked                          |
     |                  |  | fails         v                                        |
     |                  |  +-----------> ENDING <-----------------------------------+
     |        ended     |                  |
     +------------------+------------------+     after restarts_max failures in a row,
                        |                        or where nothing is restarted:  FAILED
```

A part fails when it ends without being asked to, is not ready within its start timeout, or does not
answer its first request. Failures count in a row: a part that was ready for `stable_s` starts the
count anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import aiohttp

from prfaas.cli.common.signals import EXIT_MISTAKE
from prfaas.cli.host.processes import ProcessPart, how_it_ended
from prfaas.config.services import SupervisionTable
from prfaas.errors import EngineError
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_S

MISSES_MAX = 3
"""Probes in a row that a ready part may leave unanswered before it counts as unhealthy."""


class Phase(StrEnum):
    """State of a part."""

    WAITING = "waiting"
    """Not running; it is started at `due_at_s`."""
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    """It runs and does not answer. It is not restarted for that: a busy engine may answer late."""
    ENDING = "ending"
    """It is stopping, for a restart or for good."""
    FAILED = "failed"
    """It is not started again by itself."""


RUNNING = frozenset({Phase.STARTING, Phase.READY, Phase.UNHEALTHY})


@dataclass(frozen=True, slots=True)
class PartChange:
    """A part in a new phase."""

    part: ProcessPart
    phase: Phase = Phase.WAITING
    reason: str = ""
    """Reason of its last end, as a predicate of the part; "" before anything has ended it."""
    failures: int = 0
    """Failures in a row."""
    due_at_s: float | None = None
    """Time of its next start where it waits for that, seconds of the Unix epoch."""
    pid: int | None = None
    """Its process while one runs."""
    is_mistake: bool = False
    """True if it ended before it was ever ready, because of its settings."""
    last_words: str = ""
    """The last log lines of the process that ended last."""

    @property
    def due_in_s(self) -> float | None:
        """Time until it is started, seconds; None where it waits for no start."""
        return None if self.due_at_s is None else max(0.0, self.due_at_s - time.time())


@dataclass(frozen=True, slots=True)
class KeeperTimes:
    """Times of the supervision of parts, seconds."""

    poll_s: float = 0.2
    """Between two checks of a process."""
    probe_s: float = 5.0
    """Between two probes of a part that was ready."""
    probe_timeout_s: float = 2.0
    """Limit for the answer to a probe."""
    first_delay_s: float = 1.0
    """Longest wait after the first failure in a row."""
    stable_s: float = 120.0
    """Time of readiness after which the count of failures starts anew."""


TIMES = KeeperTimes()


class Keeper:
    """Starts a part, watches it, and restarts it.

    Args:
        table: Limits of its restarts.
        http: For questions to it.
        on_change: Called at every change of its phase.
        restart: True if it is restarted when it fails.
        times: Times of checks and probes.
    """

    def __init__(
        self,
        part: ProcessPart,
        table: SupervisionTable,
        http: aiohttp.ClientSession,
        on_change: Callable[[PartChange], None],
        *,
        restart: bool,
        times: KeeperTimes = TIMES,
    ) -> None:
        self.part, self._table, self._times = part, table, times
        self._http, self._on_change, self._restart = http, on_change, restart
        self.change = PartChange(part)
        self._asked = asyncio.Event()
        self._ready_at_s: float | None = None
        self._was_ready = False

    async def run(self) -> None:
        """Keep the part until cancelled; its process is not stopped then."""
        while True:
            self._asked.clear()
            reason = await self._live()
            if self._asked.is_set():
                continue
            delay_s = self._failed(reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), delay_s)

    def restart(self) -> None:
        """Restart the part in any phase."""
        self._asked.set()
        self.change = replace(self.change, failures=0, reason="was asked to restart")
        if self.change.phase in RUNNING:
            self._enter(Phase.ENDING)
        elif self.change.phase is not Phase.ENDING:
            self._enter(Phase.WAITING, due_at_s=time.time())

    async def end(self) -> None:
        """Stop the part for good, in its own time, then by force; only while `run` does not run."""
        await self.part.stop(with_all=True)

    async def _live(self) -> str:
        """Run the process from its start until it has ended and is cleaned up; returns what ended
        it, as a predicate of the part."""
        self._ready_at_s = None
        try:
            self.part.start()
        except OSError as error:
            return f"cannot be started: {error}"
        self._enter(Phase.STARTING, due_at_s=None, pid=self.part.pid)
        reason = ""
        waits = (self._probe(), self._ended(), self._asked.wait())
        probing, *others = tasks = [asyncio.create_task(each) for each in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.part.exit_code is None:
                if not any(task.done() for task in others):
                    reason = str(probing.exception())
                    self._enter(Phase.ENDING, reason=reason)
                await cancel_all(tasks)
                await self.part.stop()
        finally:
            await cancel_all(tasks)
        await self.part.clean_up()
        return reason or how_it_ended(self.part.exit_code, self.part.last_error())

    def _failed(self, reason: str) -> float | None:
        """Count a failure; return the wait before the next start, None to wait to be asked."""
        table, failures = self._table, self.change.failures + 1
        if self._ready_at_s and time.monotonic() - self._ready_at_s >= self._times.stable_s:
            failures = 1
        is_final = not self._restart or failures > table.restarts_max
        delay_s = restart_delay_s(failures, self._times.first_delay_s, table.delay_max / NS_PER_S)
        self._enter(
            Phase.FAILED if is_final else Phase.WAITING,
            reason=reason,
            failures=failures,
            due_at_s=None if is_final else time.time() + delay_s,
            pid=None,
            is_mistake=self.part.exit_code == EXIT_MISTAKE and not self._was_ready,
            last_words=self.part.last_words(),
        )
        return None if is_final else delay_s

    async def _ended(self) -> None:
        while self.part.exit_code is None:  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(self._times.poll_s)

    async def _probe(self) -> None:
        """Probe a part that was started, and go on once it is ready.

        Raises:
            EngineError: It was not ready in time, or did not answer its first request.
        """
        began_at_s = time.monotonic()
        limit_s = (self._table.start_timeout or self.part.start_timeout_ns) / NS_PER_S
        try:
            async with asyncio.timeout(limit_s):
                while not await self._answers():  # noqa: ASYNC110 - processes signal nothing
                    await asyncio.sleep(self._times.poll_s)
                await warm_up(self._http, self.part)
        except TimeoutError:
            raise EngineError(f"was not ready within {limit_s:g} s") from None
        self._ready_at_s, self._was_ready = time.monotonic(), True
        self.part.ready_after_s = self._ready_at_s - began_at_s
        self._enter(Phase.READY)
        misses = 0
        while True:
            await asyncio.sleep(self._times.probe_s)
            misses = 0 if await self._answers() else misses + 1
            if not misses and self.change.phase is Phase.UNHEALTHY:
                self._enter(Phase.READY)
            elif misses == MISSES_MAX:
                self._enter(Phase.UNHEALTHY)

    async def _answers(self) -> bool:
        return await answers(self._http, self.part.health_url, self._times.probe_timeout_s)

    def _enter(self, phase: Phase, **changes: Any) -> None:
        self.change = replace(self.change, phase=phase, **changes)
        self._on_change(self.change)


def restart_delay_s(failures: int, first_s: float, longest_s: float) -> float:
    """Wait before a start, seconds: parts that fail together do not come back together.

    Args:
        failures: In a row, at least 1.
        first_s: Longest wait after the first of them.
        longest_s: Longest wait after any.
    """
    # Jitter; nothing secret. More than 40 doublings are beyond any `longest_s`.
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 40)) * random.uniform(0.5, 1.0)  # noqa: S311


async def answers(
    http: aiohttp.ClientSession, url: str, timeout_s: float = TIMES.probe_timeout_s
) -> bool:
    """Return True if a page answers 200 in time."""
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        # A part of our own, asked by its address: its certificate is of another name.
        async with http.get(url, timeout=limit, ssl=False) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def warm_up(http: aiohttp.ClientSession, part: ProcessPart) -> None:
    """Send a part its first request, if it has one.

    Raises:
        EngineError: It did not answer.
    """
    if part.warm_up is None:
        return
    url, body = part.warm_up
    try:
        # As long as it takes: the start's own deadline holds.
        async with http.post(url, json=body, timeout=aiohttp.ClientTimeout(total=None)) as reply:
            await reply.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"did not answer its first request: {error!r}") from None


def line_of(change: PartChange) -> str:
    """One line about a part in a new phase."""
    part = change.part
    who, log = f"{part.kind} {part.name}", part.log.absolute()
    match change.phase:
        case Phase.STARTING:
            return f"{who} is starting"
        case Phase.READY:
            return f"{who} is ready"
        case Phase.UNHEALTHY:
            return (
                f"{who} runs and does not answer at {part.health_url}; it is not restarted for "
                f"that: `prfaas ctl restart {part.name}` does so"
            )
        case Phase.ENDING:
            return f"{who} {change.reason}; stopping it"
        case Phase.WAITING:
            seconds = change.due_in_s or 0.0
            return f"{who} {change.reason}; restart in {seconds:.1f} s; see {log}"
        case Phase.FAILED:
            times = f" {change.failures} times in a row, the last time" * (change.failures > 1)
            return (
                f"{who} failed{times}: it {change.reason}; it is not restarted automatically: "
                f"`prfaas ctl restart {part.name}` does so; see {log}"
            )
