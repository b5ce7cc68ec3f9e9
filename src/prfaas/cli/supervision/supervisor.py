"""The parts of one deployment, started in order and then kept each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.supervision.keeper import TIMES, Keeper, KeeperTimes, PartChange, Phase, answers
from prfaas.config.services import SupervisionTable
from prfaas.errors import ConfigError, EngineError
from prfaas.tasks import cancel_all

_SETTLED = (Phase.READY, Phase.UNHEALTHY, Phase.FAILED)


class Supervisor:
    """Runs the parts of one deployment.

    Args:
        stages: Parts that are started together; a stage starts when the one before has settled.
        on_change: Called at every change of a part's phase.
        table: Limits of restarts.
        restart: True if failed parts are restarted.
        times: Times of checks and probes.
        keeper: Makes the keeper of a part.
    """

    def __init__(
        self,
        stages: list[list[ProcessPart]],
        on_change: Callable[[PartChange], None] = lambda _: None,
        table: SupervisionTable | None = None,
        *,
        restart: bool = False,
        times: KeeperTimes = TIMES,
        keeper: Callable[..., Keeper] = Keeper,
    ) -> None:
        self.stages, self._times, self._keeper = stages, times, keeper
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

    def changes(self) -> list[PartChange]:
        """Current state of all parts that are started or will be."""
        return [keeper.change for keeper in self._keepers.values()]

    def keeper(self, name: str) -> Keeper:
        """Keeper of a part that is started or will be; KeyError if there is no such part."""
        return self._keepers[name]

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
            waiting = {part.name for part in stage}
            while waiting := {name for name in waiting if not self._is_settled(name)}:
                await asyncio.sleep(self._times.poll_s)
                self._check_start()
        for part in self.parts:
            while part.whole_url and not await answers(
                self._http, part.whole_url, self._times.probe_timeout_s
            ):
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
        """Stop a part in its own time and forget it; KeyError if there is no such part."""
        await cancel_all([self._keeping.pop(name)])
        for stage in self.stages:
            stage[:] = [each for each in stage if each.name != name]
        await self._keepers.pop(name).end()

    def ask_restart(self, name: str) -> None:
        """Restart one part by its keeper; KeyError if no such part was started yet."""
        self._keepers[name].restart()

    async def restart(self, name: str) -> None:
        """Restart one part and wait until it is ready; EngineError if it is not restarted any
        more."""
        self.ask_restart(name)
        while (change := self.keeper(name).change).phase not in _SETTLED:  # noqa: ASYNC110 - its keeper polls, too
            await asyncio.sleep(self._times.poll_s)
        if change.phase is Phase.FAILED:
            raise _start_failure(change)

    async def stop(self) -> None:
        """Stop everything, the last started first; what does not stop in time is killed."""
        await cancel_all(self._keeping.values())
        if self._http is not None:
            await self._http.close()
        for stage in reversed(self.stages):
            kept = [self._keepers[part.name] for part in stage if part.name in self._keepers]
            await asyncio.gather(*(keeper.end() for keeper in kept))

    def _keep(self, part: ProcessPart, http: aiohttp.ClientSession) -> None:
        keeper = self._keeper(
            part, self._table, http, self._on_change, restart=self._restart, times=self._times
        )
        self._keepers[part.name] = keeper
        self._keeping[part.name] = asyncio.create_task(keeper.run())

    def _is_settled(self, name: str) -> bool:
        """Return True if nobody has to wait for a part: it is ready, or has failed and is tried
        again."""
        change = self.keeper(name).change
        return change.phase in _SETTLED or change.failures > 0

    def _check_start(self) -> None:
        """Raise what ends a first start: an operator's mistake, or any failure, unrestarted."""
        for task in self._keeping.values():
            if task.done():
                task.result()
        for change in self.changes():
            is_given_up = change.phase is Phase.FAILED and not self._restart
            if change.failures and (change.is_mistake or is_given_up):
                raise _start_failure(change)


def _start_failure(change: PartChange) -> Exception:
    part, words = change.part, change.last_words
    if change.is_mistake:
        return ConfigError(f"{part.kind} {part.name} refused to start:\n{words}")
    return EngineError(
        f"{part.kind} {part.name} {change.reason}, before all parts were ready; "
        f"the end of {part.log}:\n{words}"
    )
