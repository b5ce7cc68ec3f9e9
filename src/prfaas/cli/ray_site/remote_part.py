"""A part whose process an actor owns, for the supervisor of `prfaas up`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from prfaas.cli.host.processes import KILL_S, ProcessPart
from prfaas.cli.ray_site.actor import PROBE_TIMEOUT_S, PartActor, Status
from prfaas.cli.ray_site.hosts import Host
from prfaas.cli.ray_site.parts import PartSpec

LOST = -1
"""Exit code of a part whose actor or node is lost."""


class RemotePart(ProcessPart):
    """A part on a host of the site.

    Args:
        part: The part as its host has it.
        spec: Called before each start: the part may have moved.
        members: Folder and text of the member files.
    """

    def __init__(
        self,
        part: ProcessPart,
        host: Host,
        spec: Callable[[], PartSpec],
        members: Callable[[], tuple[Path, dict[str, str]]],
    ) -> None:
        super().__init__(**{f.name: getattr(part, f.name) for f in fields(part) if f.init})
        self.probe = self._answers
        self._host, self._spec, self._members = host, spec, members
        self._actor: Any = None
        self._asked: Any = None
        self._status: Status | None = None

    @property
    def exit_code(self) -> int | None:
        """Exit code as last reported; None while it runs."""
        self._poll()
        return self._status.exit_code if self._status else None

    @property
    def is_started(self) -> bool:
        """Return True once it was started."""
        return self._actor is not None

    @property
    def pid(self) -> int | None:
        """Process on its host."""
        return self._status.pid if self._status else None

    def start(self) -> None:
        """Place the part's actor.

        Raises:
            OSError: There is no node for it now.
        """
        import ray

        node = self._host.node()
        if node is None:
            raise OSError(f"no node of the Ray cluster has room for {self._host.name} now")
        spec = self._spec()
        folder, members = self._members()
        self.ready_after_s, self._status, self._asked = None, None, None
        options = {**self._host.options(self.name), "name": self.name, "max_restarts": 0}
        try:
            self._actor = (
                ray.remote(PartActor).options(**options).remote(spec, Path.cwd(), folder, members)
            )
        except ValueError as error:  # its name is not free yet
            raise OSError(str(error)) from error

    def write_members(self, folder: Path, members: dict[str, str]) -> None:
        """Replace the member files of its host, soon."""
        if self._actor is not None and self.exit_code is None:
            self._actor.write_members.remote(folder, members)

    async def is_idle(self, url: str) -> bool:
        """Return True if an engine has no request, or is not there any more."""
        if self.exit_code is not None:
            return True
        return bool(await self._ask(self._actor.is_idle, url))

    def terminate(self, *, with_all: bool = False) -> None:
        """Ask the process to stop."""
        if self._actor is not None and self.exit_code is None:
            self._actor.terminate.remote()

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self.exit_code is not None

    def is_gone(self) -> bool:
        """Return True if the process and all it started have ended."""
        return self.exit_code is not None and bool(self._status and self._status.is_gone)

    async def clean_up(self) -> None:
        """End the actor, and with it what is left of the process."""
        import ray

        if self._actor is None:
            return
        await self._ask(self._actor.clean_up, timeout_s=KILL_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
        lost = Status(None, LOST, True)
        self._actor, self._status, self._asked = None, self._status or lost, None

    def last_error(self) -> str:
        """The error that ended it."""
        return self._status.error if self._status else ""

    def last_words(self) -> str:
        """Its last log lines."""
        return self._status.last_words if self._status else ""

    async def _answers(self, timeout_s: float) -> bool:
        return bool(await self._ask(self._actor.answers, timeout_s=timeout_s))

    async def _ask(self, method: Any, *args: Any, timeout_s: float = 2 * PROBE_TIMEOUT_S) -> Any:
        """Result of a method of the actor; None if there is none in time."""
        import ray

        try:
            return await asyncio.wait_for(
                asyncio.wrap_future(method.remote(*args).future()), timeout_s
            )
        except (ray.exceptions.RayError, TimeoutError):
            return None

    def _poll(self) -> None:
        """Take the actor's report, if it has come, and ask for the next one."""
        import ray

        if self._actor is None or (self._status and self._status.is_gone):
            return
        if self._asked is None:
            self._asked = self._actor.status.remote()
        ready, _ = ray.wait([self._asked], timeout=0)
        if ready:
            self._asked = None
            try:
                self._status = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                text = "its actor is lost: " + str(error).strip().splitlines()[0]
                self._status = Status(None, LOST, True, text, f"    {text}")
