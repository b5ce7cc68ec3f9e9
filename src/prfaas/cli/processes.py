"""Starting, watching and stopping the processes of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from prfaas.cli.main import EXIT_MISTAKE
from prfaas.cli.process_group import die_with_parent, members, shared_segments
from prfaas.engines.launch import Command
from prfaas.errors import ConfigError, EngineError

STOP_S = 15.0
"""How long a process may take to stop before it is killed, beside what it has to finish first."""
GRACE_S = 3.0
"""How long what it started may go on after it, to tidy up shared memory."""
POLL_S = 0.2
LOG_LINES = 12
"""Last lines of a log shown when its process ends during start-up."""
LOG_BYTES = 2**18
"""Part of a log that is looked at."""
RAISED = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)")
"""The last line of a traceback, printed or logged."""
CAUSES_MAX = 3


@dataclass(slots=True)
class Part:
    """A process of a deployment.

    Attributes:
        name: Name in the deployment file.
        kind: "pool node", "engine" or "gateway".
        command: What to run.
        health_url: Answers 200 once the part is ready.
        log: Where its output goes.
        leftovers: Files to remove once it is gone.
        stop_s: How long it may take to stop before it is killed.
        warm_up: Request that makes a ready engine do its first, slow work; None for none.
    """

    name: str
    kind: str
    command: Command
    health_url: str
    log: Path
    leftovers: list[Path] = field(default_factory=list)
    warm_up: tuple[str, dict[str, object]] | None = None
    stop_s: float = STOP_S
    process: subprocess.Popen[bytes] | None = None
    ready_after_s: float | None = None
    reported: bool = False
    """Whether its end was told by `Supervisor.died`."""
    _segments: set[Path] = field(default_factory=set)
    _is_clean: bool = False
    _log_start: int = 0
    """Where the output of this start begins in the log, bytes."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs or before it was started."""
        return self.process.poll() if self.process else None

    def start(self) -> None:
        """Start the process, in a session of its own so that Ctrl-C reaches only us."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.ready_after_s, self.reported, self._is_clean = None, False, False
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                self.command.args,
                env=self.command.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread of ours holds a lock
            )
        self._segments = set()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all it started; harmless if they are gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def terminate(self) -> None:
        """Ask the process to stop."""
        if self.process is not None and self.exit_code is None:
            self._look()
            self.process.terminate()

    def has_ended(self) -> bool:
        """Whether the process has ended; all it started may go on."""
        self._look()
        return self.exit_code is not None

    def is_gone(self) -> bool:
        """Whether the process and all it started have ended."""
        return not self._look() and self.exit_code is not None

    def clean_up(self) -> None:
        """End what the process left behind, and remove its files and shared memory."""
        if self.process is None or self._is_clean:
            return
        self._look()
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._is_clean = True
        for path in [*self.leftovers, *self._segments]:
            path.unlink(missing_ok=True)

    def _look(self) -> list[int]:
        """Who is left, having noted what shared memory they hold: they may leave it behind."""
        left = members(self.process.pid) if self.process else []
        self._segments |= shared_segments(left)
        return left

    def last_words(self) -> str:
        """What it logged at its end, below the errors it logged before: one may be the cause."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            errors = [found[1] for line in lines[:-LOG_LINES] if (found := RAISED.search(line))]
            causes = list(dict.fromkeys(errors))[-CAUSES_MAX:]
            return "\n".join(f"    {line}" for line in [*causes, *lines[-LOG_LINES:]])
        return ""


class Supervisor:
    """Runs the parts of one deployment. Restarts nothing by itself.

    Args:
        stages: Parts that are started together; a stage starts when the one before is ready.
        on_progress: Called whenever a part is started or becomes ready.
    """

    def __init__(
        self, stages: list[list[Part]], on_progress: Callable[[Part], None] = lambda _: None
    ) -> None:
        self.stages = stages
        self._on_progress = on_progress

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order they start in."""
        return [part for stage in self.stages for part in stage]

    def part(self, name: str) -> Part:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)

    async def start(self) -> None:
        """Start everything and wait until all of it is ready.

        Raises:
            ConfigError: A part found a mistake in its settings; its own line says which.
            EngineError: A part ended before all were ready.
        """
        async with aiohttp.ClientSession() as session:
            for stage in self.stages:
                for part in stage:
                    part.start()
                    self._on_progress(part)
                waits = [asyncio.create_task(self._ready(session, part)) for part in stage]
                waits.append(asyncio.create_task(self._none_ends(waits.copy())))
                try:
                    await asyncio.gather(*waits)
                finally:
                    for wait in waits:
                        wait.cancel()

    async def restart(self, name: str) -> None:
        """Start one part anew and wait until it is ready."""
        part = self.part(name)
        part.clean_up()
        part.start()
        async with aiohttp.ClientSession() as session:
            await self._ready(session, part)

    async def stop(self) -> None:
        """Stop everything, the last started first; what does not stop in time is killed."""
        for stage in reversed(self.stages):
            started = [part for part in stage if part.process]
            for part in started:
                part.terminate()
            longest_s = max((part.stop_s for part in started), default=0.0)
            await _within(longest_s, started, Part.has_ended)
            await _within(GRACE_S, started, Part.is_gone)
            for part in started:
                part.clean_up()

    async def died(self) -> Part:
        """Wait until a part ends by itself, and end what it leaves behind; reported once."""
        while True:
            for part in self.parts:
                if part.process and part.exit_code is not None and not part.reported:
                    part.reported = True
                    part.clean_up()
                    # What was killed holds memory and devices until the kernel has ended it.
                    await _within(GRACE_S, [part], Part.is_gone)
                    return part
            await asyncio.sleep(POLL_S)

    async def _none_ends(self, waits: list[asyncio.Task[None]]) -> None:
        """See that no part ends while others are waited for, not even one that was ready."""
        while not all(wait.done() for wait in waits):
            for part in self.parts:
                if part.exit_code is not None:
                    raise _start_failure(part)
            await asyncio.sleep(POLL_S)

    async def _ready(self, session: aiohttp.ClientSession, part: Part) -> None:
        began = time.monotonic()
        while not await _answers(session, part.health_url):
            if part.exit_code is not None:
                raise _start_failure(part)
            await asyncio.sleep(POLL_S)
        await _warm_up(session, part)
        part.ready_after_s = time.monotonic() - began
        self._on_progress(part)


async def _within(limit_s: float, parts: list[Part], done: Callable[[Part], bool]) -> None:
    """Wait until all parts are done, or the time is over."""
    deadline = time.monotonic() + limit_s
    while True:
        if all(done(part) for part in parts) or time.monotonic() > deadline:
            return
        await asyncio.sleep(POLL_S / 4)


def _start_failure(part: Part) -> Exception:
    words = part.last_words()
    if part.exit_code == EXIT_MISTAKE:
        return ConfigError(f"{part.kind} {part.name} refused to start:\n{words}")
    return EngineError(
        f"{part.kind} {part.name} ended with code {part.exit_code} before all parts were ready; "
        f"the end of {part.log}:\n{words}"
    )


async def _warm_up(session: aiohttp.ClientSession, part: Part) -> None:
    if part.warm_up is None:
        return
    url, body = part.warm_up
    try:
        async with session.post(url, json=body) as reply:
            await reply.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(
            f"{part.kind} {part.name} did not answer its first request: {error!r}; "
            f"the end of {part.log}:\n{part.last_words()}"
        ) from None


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
