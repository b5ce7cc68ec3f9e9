"""Running until a signal, and the exit codes of commands."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from prfaas.errors import ConfigError

T = TypeVar("T")
EXIT_FAILURE, EXIT_MISTAKE = 1, 2
"""Exit codes when a part failed, and when the operator has to change something."""

EXIT_SIGNAL = 128
"""A command that a signal ended before it was done exits with this and the signal's number, as
shells show it: 130 after Ctrl-C, 143 after SIGTERM."""


class StoppedEarlyError(Exception):
    """A signal ended a command before its completion."""


class StopEvent(asyncio.Event):
    """Set by the signal that stops a process."""

    number: signal.Signals | None = None
    """The first signal."""


def run_until_stopped(main: Callable[[StopEvent], Awaitable[None]]) -> None:
    """Run `main` on an event loop; SIGINT and SIGTERM set the event it is given.

    So does SIGHUP, unless it is ignored (`nohup`) or `main` has a use of its own for it. A second
    signal cancels it. Once `main` has returned, the stop was a clean one and the exit code is the
    caller's; where it raises `StoppedEarlyError` or is cancelled, the process exits with
    `EXIT_SIGNAL` and the number of the last signal.
    """
    received: list[signal.Signals] = []

    async def run() -> None:
        stop, loop = StopEvent(), asyncio.get_running_loop()
        running = asyncio.ensure_future(main(stop))

        def on_signal(number: signal.Signals) -> None:
            received.append(number)
            if stop.is_set():
                running.cancel()
            else:
                stop.number = number
            stop.set()

        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        for number in (signal.SIGINT, signal.SIGTERM, *hangup):
            loop.add_signal_handler(number, on_signal, number)
        with contextlib.suppress(asyncio.CancelledError):
            await running
        if running.cancelled():
            raise StoppedEarlyError

    try:
        asyncio.run(run())
    except StoppedEarlyError:
        sys.exit(EXIT_SIGNAL + (received or [signal.SIGINT])[-1])


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T:
    """Result of some work; StoppedEarlyError if it is cancelled because `stop` was set first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StoppedEarlyError
        return task.result()
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def raise_first(task: asyncio.Task[None]) -> None:
    """Raise what ended a task, the operator's mistake first if it is in a group."""
    error = task.exception()
    if isinstance(error, BaseExceptionGroup):
        mistakes = error.subgroup((ConfigError, ssl.SSLError, OSError))
        raise (mistakes or error).exceptions[0]
    if error is not None:
        raise error
