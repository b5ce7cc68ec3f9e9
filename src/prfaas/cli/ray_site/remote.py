"""A part on a host of the site: an actor keeps it there, and `prfaas ray up` follows the actor.

Ray starts a lost actor again, on another node if its own is lost. All else is decided by the keeper
in the actor, as in `prfaas up --restart`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.host.processes import GRACE_S, KILL_S, ProcessPart
from prfaas.cli.ray_site.hosts import Host
from prfaas.cli.ray_site.parts import Members, PartSpec, write_members
from prfaas.cli.supervision.keeper import TIMES, Keeper, PartChange, Phase
from prfaas.config.services import SupervisionTable
from prfaas.tasks import cancel_all

POLL_S = 0.2
ANSWER_S = 30.0
"""Time limit of an answer of an actor, its start included; Ray notices a lost node sooner."""
WORK = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.M)


@dataclass(frozen=True, slots=True)
class Report:
    """State of a part on its host."""

    version: int
    """Version of the member files there; 0 before it has any."""
    host: str
    """Address of its node."""
    change: PartChange | None
    """Its phase; None before there is a keeper."""
    fault: str
    """Reason why there is none."""


class PartActor:
    """A part on this host. Its process ends with the actor.

    Args:
        table: Limits of its restarts.
        directory: Working directory, where relative paths of the deployment file start.
    """

    def __init__(self, spec: PartSpec, table: SupervisionTable, directory: Path) -> None:
        import ray

        os.chdir(directory)
        self._spec, self._table, self._version, self._fault = spec, table, 0, ""
        self._host: str = ray.util.get_node_ip_address()
        self._kept: tuple[Keeper, ProcessPart, aiohttp.ClientSession, asyncio.Task[None]] | None = (
            None
        )

    async def report(self, members: Members | None) -> Report:
        """State of the part, which starts when the first member files have come.

        Args:
            members: New member files of this host; None if it has them.
        """
        if members is not None:
            write_members(members.folder, members.files)
            self._version = members.version
        if self._version and self._kept is None and not self._fault:
            self._keep()
        change = None
        if self._kept is not None:
            # Without the process, which does not travel.
            change = replace(self._kept[0].change, part=self._kept[1])
        return Report(self._version, self._host, change, self._fault)

    async def restart(self) -> None:
        """Restart the part in any phase."""
        self._fault = ""
        if self._kept is not None:
            self._kept[0].restart()

    async def is_idle(self, url: str) -> bool:
        """Return True if an engine has no request."""
        if self._kept is None:
            return True
        try:
            async with self._kept[2].get(f"{url}/metrics") as reply:
                return not any(float(n) for n in WORK.findall(await reply.text()))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False

    async def stop(self) -> None:
        """Stop the part for good."""
        if self._kept is not None:
            keeper, _, _, task = self._kept
            await cancel_all([task])
            await keeper.part.stop()

    def _keep(self) -> None:
        try:
            part = self._spec.part(self._host)
        except Exception as error:  # shown by `prfaas ctl parts`, whatever it is
            self._fault = f"cannot be started on {self._host}: {error}"
            return
        http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMES.probe_timeout_s))
        shown = copy.copy(part)
        keeper = Keeper(part, self._table, http, lambda _: None, restart=True)
        self._kept = keeper, shown, http, asyncio.create_task(keeper.run())


class RemoteKeeper(Keeper):
    """Follows the actor of a part.

    Args:
        host: Where the part runs.
        members: Called for the member files of now.
        on_host: Called with the name of the part and the address of its node.
        more: See `Keeper`.
    """

    def __init__(
        self,
        *args: Any,
        host: Host,
        spec: PartSpec,
        members: Callable[[], Members],
        on_host: Callable[[str, str], None],
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self._node, self._spec, self._members, self._on_host = host, spec, members, on_host
        self._actor: Any = None
        self._version = 0

    async def run(self) -> None:
        """Follow the actor until cancelled; it is not stopped then."""
        import ray

        while True:
            members = self._members()
            try:
                if self._actor is None:
                    self._actor = self._start()
                if self._asked.is_set():
                    self._asked.clear()
                    await self._ask("restart")
                is_new = members.version != self._version
                report: Report = await self._ask("report", members if is_new else None)
                if not self._asked.is_set():
                    self._take(report)
            except TimeoutError:
                has_node = self._node.node() is not None
                why = f"no node of the Ray cluster has room for {self._node.name} now"
                self._lost("waits: " + ("its actor does not answer" if has_node else why))
            except (ray.exceptions.RayError, ValueError) as error:
                words = str(error).strip() or type(error).__name__
                self._lost("lost its actor: " + words.splitlines()[0])
                if isinstance(error, ray.exceptions.ActorDiedError):
                    self._kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), POLL_S)

    async def is_idle(self) -> bool:
        """Return True if an engine has no request, or is not there any more."""
        import ray

        try:
            return bool(await self._ask("is_idle", self.part.places[self.part.name]))
        except (ray.exceptions.RayError, TimeoutError):
            return self.change.pid is None

    async def end(self) -> None:
        """Stop the part and end its actor."""
        import ray

        if self._actor is not None:
            limit_s = self.part.stop_s + GRACE_S + KILL_S if self.change.pid else GRACE_S
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                await self._ask("stop", limit_s=limit_s)
            self._kill()

    def _kill(self) -> None:
        import ray

        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actor)
            self._actor = None

    def _start(self) -> Any:
        import ray

        options = {**self._node.options(self.part.name), "name": self.part.name, "max_restarts": -1}
        actor = ray.remote(PartActor).options(**options)
        return actor.remote(self._spec, self._table, Path.cwd())

    async def _ask(self, method: str, *args: Any, limit_s: float = ANSWER_S) -> Any:
        """Result of a method of the actor.

        Raises:
            RayError: The actor is lost.
            TimeoutError: It has not answered in time.
        """
        future = getattr(self._actor, method).remote(*args).future()
        return await asyncio.wait_for(asyncio.wrap_future(future), limit_s)

    def _take(self, report: Report) -> None:
        self._version, found = report.version, report.change
        self._on_host(self.part.name, report.host)
        before = self.change
        if report.fault:
            self._lost(report.fault, Phase.FAILED)
        elif found is not None:
            self.part.places, self.part.ready_after_s = found.part.places, found.part.ready_after_s
            self.change = replace(found, part=self.part)
            if (before.phase, before.pid) != (found.phase, found.pid):
                self._on_change(self.change)

    def _lost(self, reason: str, phase: Phase = Phase.WAITING) -> None:
        self._version = 0
        fault = {"is_mistake": phase is Phase.FAILED, "last_words": reason}
        if (self.change.phase, self.change.reason) != (phase, reason):
            self._enter(phase, reason=reason, failures=1, due_at_s=None, pid=None, **fault)
