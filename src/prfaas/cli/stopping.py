"""Running until somebody stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import Awaitable, Callable

from prfaas.errors import ConfigError


def run_until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main` on an event loop; SIGINT and SIGTERM set the event it is given.

    So does SIGHUP, unless it is ignored (`nohup`) or `main` has a use of its own for it. A second
    signal cancels it.
    """

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        running = asyncio.ensure_future(main(stop))

        def on_signal() -> None:
            if stop.is_set():
                running.cancel()
            stop.set()

        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        for number in (signal.SIGINT, signal.SIGTERM, *hangup):
            loop.add_signal_handler(number, on_signal)
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())


def raise_first(task: asyncio.Task[None]) -> None:
    """Raise what ended a task, the operator's mistake first if it is in a group."""
    error = task.exception()
    if isinstance(error, BaseExceptionGroup):
        mistakes = error.subgroup((ConfigError, ssl.SSLError, OSError))
        raise (mistakes or error).exceptions[0]
    if error is not None:
        raise error
