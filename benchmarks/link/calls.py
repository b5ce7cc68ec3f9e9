"""Calls of two processes to the kernel, counted by perf where it is installed."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOCKETS = ("sendmsg", "sendto", "write", "recvfrom", "recvmsg", "read")
"""Calls that move bytes of a socket; OpenSSL reads and writes."""
WAKE_UPS = ("epoll_wait", "epoll_pwait")
OTHERS = ("futex", "setsockopt", "getsockopt", "epoll_ctl")
EVENTS = [f"syscalls:sys_enter_{name}" for name in (*SOCKETS, *WAKE_UPS, *OTHERS)]


@dataclass
class Calls:
    """Counts of one process.

    Attributes:
        sockets: Calls that move bytes.
        wake_ups: Returns of its event loops to the selector.
        others: Locks, socket options, changes of the selector.
    """

    sockets: int = 0
    wake_ups: int = 0
    others: int = 0


@dataclass
class Counted:
    """Counts of each process, in the order of their numbers; empty without perf."""

    of: list[Calls] = field(default_factory=list)


@asynccontextmanager
async def counted(processes: Sequence[int], directory: Path) -> AsyncIterator[Counted]:
    """Count calls while the block runs.

    Args:
        processes: Their ids.
        directory: For the counts.
    """
    found = Counted()
    perf = shutil.which("perf")
    if perf is None:
        yield found
        return
    files = [directory / f"calls-{number}" for number in processes]
    running = [
        await asyncio.create_subprocess_exec(
            perf, "stat", "-x,", "-e", ",".join(EVENTS), "-p", str(number), "-o", str(file)
        )
        for number, file in zip(processes, files, strict=True)
    ]
    await asyncio.sleep(0.5)  # Until perf has attached: it reports nothing.
    yield found
    for one in running:
        one.send_signal(signal.SIGINT)
        await one.wait()
    found.of = [_calls(file.read_text()) for file in files]


def _calls(table: str) -> Calls:
    found = Calls()
    for line in table.splitlines():
        fields = line.split(",")
        if len(fields) < 3 or not fields[0].isdigit():
            continue
        name = fields[2].removeprefix("syscalls:sys_enter_")
        if name in SOCKETS:
            found.sockets += int(fields[0])
        elif name in WAKE_UPS:
            found.wake_ups += int(fields[0])
        else:
            found.others += int(fields[0])
    return found
