"""Keeper of one part: executes its restart policy."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from prfaas.cli.host.processes import GRACE_S, ProcessPart, how_it_ended, within
from prfaas.cli.supervision.restarts import (
    FIRST_DELAY_NS,
    RUNNING,
    Instruction,
    Phase,
    RestartPolicy,
    Restarts,
)
from prfaas.errors import EngineError
from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class KeeperTimes:
    """Times of the supervision of parts.

    Attributes:
        poll_s: Between two checks of a process, seconds.
        probe_ns: Between two probes of a part that was ready, ns.
        probe_timeout_s: Limit for the answer to a probe, seconds.
        first_delay_ns: Longest wait after the first failure, ns.
    """

    poll_s: float = 0.2
    probe_ns: int = 5 * NS_PER_S
    probe_timeout_s: float = 2.0
    first_delay_ns: int = FIRST_DELAY_NS


TIMES = KeeperTimes()


class Keeper:
    """Starts a part, watches it, and restarts it by its policy.

    Args:
        policy: Limits of its restarts.
        on_change: Called at every change of its phase.
        times: Times of checks and probes.
    """

    def __init__(
        self,
        part: ProcessPart,
        policy: RestartPolicy,
        http: aiohttp.ClientSession,
        on_change: Callable[[Keeper], None],
        times: KeeperTimes = TIMES,
    ) -> None:
        self.part, self._times = part, times
        # Jitter of restarts; nothing secret.
        self.restarts = Restarts(policy, random.random, time.monotonic_ns())
        self._http, self._on_change = http, on_change
        self._wake = asyncio.Event()
        self._probing: asyncio.Task[bool] | None = None
        self._probe_due_at_ns = 0
        self._end = False

    async def run(self) -> None:
        """Keep the part until cancelled; its process is not stopped then."""
        phase = None
        try:
            while True:
                await self._turn()
                if phase is not self.restarts.phase:
                    phase = self.restarts.phase
                    self._on_change(self)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._times.poll_s)
                self._wake.clear()
        finally:
            self._forget_probe()

    def restart(self) -> None:
        """Restart the part in any phase."""
        if self.restarts.asked(time.monotonic_ns()) is Instruction.END:
            self._end = True
        self._wake.set()

    async def _turn(self) -> None:
        restarts, instruction = self.restarts, self.restarts.tick(time.monotonic_ns())
        if instruction is Instruction.START:
            self._start()
        elif instruction is Instruction.END or self._end:
            await self._stop()
        elif restarts.phase in RUNNING and self.part.exit_code is not None:
            await self._ended()
        elif restarts.phase in RUNNING:
            self._probe()

    def _start(self) -> None:
        # A restart may have been asked for while the process before this one was cleaned up.
        self._end = False
        try:
            self.part.start()
        except OSError as error:
            self.restarts.ended(time.monotonic_ns(), f"cannot be started: {error}")
            return
        self.restarts.started(time.monotonic_ns())
        self._probe_due_at_ns = 0

    async def _stop(self) -> None:
        """End the process in its own time, then by force."""
        self._end = False
        self._on_change(self)
        self.part.terminate()
        await within(self.part.stop_s, [self.part], ProcessPart.has_ended)
        await within(GRACE_S, [self.part], ProcessPart.is_gone)
        await self._ended()

    async def _ended(self) -> None:
        self._forget_probe()
        await self.part.clean_up()
        reason = how_it_ended(self.part.exit_code, self.part.last_error())
        self.restarts.ended(time.monotonic_ns(), reason)

    def _probe(self) -> None:
        """Begin a due probe, or handle the result of a completed one."""
        now_ns = time.monotonic_ns()
        if self._probing is None and now_ns >= self._probe_due_at_ns:
            is_starting = self.restarts.phase is Phase.STARTING
            self._probing = asyncio.create_task(self._ask(is_starting=is_starting))
        elif self._probing is not None and self._probing.done():
            self._take_up(self._probing, now_ns)
            self._probing = None

    def _take_up(self, probing: asyncio.Task[bool], now_ns: int) -> None:
        was_starting = self.restarts.phase is Phase.STARTING
        if (error := probing.exception()) is not None:
            instruction = self.restarts.start_failed(now_ns, str(error))
            self._end = instruction is Instruction.END
            return
        started_ns = self.restarts.since_ns
        self.restarts.probed(now_ns, answers=probing.result())
        if was_starting and self.restarts.phase is Phase.READY:
            self.part.ready_after_s = (now_ns - started_ns) / NS_PER_S
        if not was_starting or self.part.ready_after_s is not None:
            self._probe_due_at_ns = now_ns + self._times.probe_ns

    async def _ask(self, *, is_starting: bool) -> bool:
        """Return True if the part answers.

        Raises:
            EngineError: It is well, and did not answer its first request.
        """
        timeout_s = self._times.probe_timeout_s
        if not await (
            self.part.probe(timeout_s)
            if self.part.probe is not None
            else answers(self._http, self.part.health_url, timeout_s)
        ):
            return False
        if is_starting:
            await warm_up(self._http, self.part)
        return True

    def _forget_probe(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None


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
