"""The parts of one deployment, started in order and then kept each by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp

from prfaas.cli.common.signals import EXIT_MISTAKE
from prfaas.cli.host.processes import GRACE_S, ProcessPart, within
from prfaas.cli.supervision.keeper import TIMES, Keeper, KeeperTimes, answers
from prfaas.cli.supervision.restarts import Phase, RestartPolicy
from prfaas.config.services import SupervisionTable
from prfaas.errors import ConfigError, EngineError
from prfaas.tasks import cancel_all

_SETTLED = (Phase.READY, Phase.UNHEALTHY, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class PartChange:
    """A part in a new phase.

    Attributes:
        reason: What ended it last; "" before anything has.
        due_in_s: Until it is started, where it waits for that.
    """

    part: ProcessPart
    phase: Phase
    reason: str
    due_in_s: float | None
    failures: int


class Supervisor:
    """Runs the parts of one deployment.

    Args:
        stages: Parts that are started together; a stage starts when the one before has settled.
        on_change: Called at every change of a part's phase.
        restart: True if failed parts are restarted.
        times: Times of checks and probes.
    """

    def __init__(
        self,
        stages: list[list[ProcessPart]],
        on_change: Callable[[PartChange], None] = lambda _: None,
        table: SupervisionTable | None = None,
        *,
        restart: bool = False,
        times: KeeperTimes = TIMES,
    ) -> None:
        self.stages, self._times = stages, times
        self._on_change, self._restart = on_change, restart
        self._table = table or SupervisionTable()
        self._keepers: dict[str, Keeper] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._http: aiohttp.ClientSession | None = None

    @property
    def parts(self) -> list[ProcessPart]:
        """All parts, in the order they start in."""
        return [part for stage in self.stages for part in stage]

    def part(self, name: str) -> ProcessPart:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)

    def changes(self) -> Iterable[PartChange]:
        """Current state of all parts that are started or will be."""
        return [_change(keeper) for keeper in self._keepers.values()]

    async def start(self) -> None:
        """Start everything and wait until all is ready; of parts that are restarted, until each is
        ready or has failed once.

        Raises:
            ConfigError: A part found a mistake in its settings; its log line names it.
            EngineError: A part failed, and nothing is restarted.
        """
        self._http = aiohttp.ClientSession()
        for stage in self.stages:
            for part in stage:
                self._keep(part, self._http)
            await self._settled(stage)
        for part in self.parts:
            while part.whole_url and not await self._answers(self._http, part.whole_url):
                self._check_start()
                if any(each.failures and each.phase is not Phase.READY for each in self.changes()):
                    return
                await asyncio.sleep(self._times.poll_s)

    def add(self, part: ProcessPart) -> None:
        """Start one more part; only after `start`."""
        if self._http is None:
            raise ValueError("nothing is started yet")
        self.stages[-1].append(part)
        self._keep(part, self._http)

    async def remove(self, name: str) -> None:
        """Stop a part in its own time and forget it.

        Raises:
            KeyError: There is no such part.
        """
        part = self.part(name)
        await cancel_all([self._keeping.pop(name)])
        del self._keepers[name]
        for stage in self.stages:
            stage[:] = [each for each in stage if each is not part]
        await _end([part] if part.is_started else [])

    def ask_restart(self, name: str) -> None:
        """Restart one part by its keeper.

        Raises:
            KeyError: No such part was started yet.
        """
        self._keepers[name].restart()

    async def restart(self, name: str) -> None:
        """Restart one part and wait until it is ready.

        Raises:
            EngineError: It is not restarted any more.
        """
        restarts = self._keepers[name].restarts
        self.ask_restart(name)
        while restarts.phase not in _SETTLED:  # noqa: ASYNC110 - its keeper polls, too
            await asyncio.sleep(self._times.poll_s)
        if restarts.phase is Phase.FAILED:
            raise _start_failure(self.part(name), restarts.reason)

    async def stop(self) -> None:
        """Stop everything, the last started first; what does not stop in time is killed."""
        await cancel_all(list(self._keeping.values()))
        if self._http is not None:
            await self._http.close()
        for stage in reversed(self.stages):
            await _end([part for part in stage if part.is_started])

    def _keep(self, part: ProcessPart, http: aiohttp.ClientSession) -> None:
        policy = RestartPolicy(
            is_enabled=self._restart,
            start_timeout_ns=self._table.start_timeout or part.start_timeout_ns,
            restarts_max=self._table.restarts_max,
            delay_max_ns=self._table.delay_max,
            first_delay_ns=self._times.first_delay_ns,
        )
        keeper = Keeper(
            part, policy, http, lambda each: self._on_change(_change(each)), self._times
        )
        self._keepers[part.name] = keeper
        self._keeping[part.name] = asyncio.create_task(keeper.run())

    async def _answers(self, http: aiohttp.ClientSession, url: str) -> bool:
        return await answers(http, url, self._times.probe_timeout_s)

    async def _settled(self, stage: list[ProcessPart]) -> None:
        waiting = {part.name for part in stage}
        while waiting:
            await asyncio.sleep(self._times.poll_s)
            self._check_start()
            waiting = {name for name in waiting if not self._is_settled(name)}

    def _is_settled(self, name: str) -> bool:
        """Return True if nobody has to wait for a part: it is ready, or has failed and is tried
        again."""
        restarts = self._keepers[name].restarts
        return restarts.phase in _SETTLED or restarts.failures > 0

    def _check_start(self) -> None:
        """Raise what ends a first start: an operator's mistake, or any failure, unrestarted."""
        for task in self._keeping.values():
            if task.done():
                task.result()
        for keeper in self._keepers.values():
            restarts, part = keeper.restarts, keeper.part
            is_mistake = part.exit_code == EXIT_MISTAKE and not restarts.was_ready
            is_given_up = restarts.phase is Phase.FAILED and not self._restart
            if restarts.failures and (is_mistake or is_given_up):
                raise _start_failure(part, restarts.reason)


async def _end(parts: list[ProcessPart]) -> None:
    """Stop parts together; what does not stop in time is killed."""
    for part in parts:
        part.terminate(with_all=True)
    longest_s = max((part.stop_s for part in parts), default=0.0)
    await within(longest_s, parts, ProcessPart.has_ended)
    await within(GRACE_S, parts, ProcessPart.is_gone)
    await asyncio.gather(*(part.clean_up() for part in parts))


def _change(keeper: Keeper) -> PartChange:
    restarts = keeper.restarts
    due_at_ns = restarts.due_at_ns if restarts.phase is Phase.WAITING else None
    due_in_s = max(0.0, (due_at_ns - time.monotonic_ns()) / 1e9) if due_at_ns is not None else None
    return PartChange(keeper.part, restarts.phase, restarts.reason, due_in_s, restarts.failures)


def _start_failure(part: ProcessPart, reason: str) -> Exception:
    words = part.last_words()
    if part.exit_code == EXIT_MISTAKE:
        return ConfigError(f"{part.kind} {part.name} refused to start:\n{words}")
    return EngineError(
        f"{part.kind} {part.name} {reason}, before all parts were ready; "
        f"the end of {part.log}:\n{words}"
    )
