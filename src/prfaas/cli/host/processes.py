"""The processes of a deployment: how each is started, signalled, and cleaned up after.

A vLLM engine is several processes. When the main process is killed, the others continue and
keep their memory; named segments in `/dev/shm` outlive them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.engines.launch import Command
from prfaas.units import NS_PER_S

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm/"  # noqa: S108
SEGMENT_PREFIXES = ("psm_", "sem.mp-")
"""Names that Python's `multiprocessing` gives to segments and semaphores."""
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Called in a new process: the kernel stops it with its parent."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def members(group: int) -> list[int]:
    """Processes of a group; empty once all are gone.

    A process whose first thread has ended is shown as a zombie (proc(5)) while its other threads
    go on and hold its memory, files and locks; it counts until the last of them has ended.
    """
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name in parentheses may hold anything; what follows it may not.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and (fields[0] != "Z" or int(fields[17]) > 1):
                    found.append(int(entry.name))
    return found


def shared_segments(pids: list[int]) -> set[Path]:
    """Segments and semaphores of `multiprocessing` that processes have mapped.

    Told apart by inode: the mapping of a semaphore shows the name it had before it got its own.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / "maps").read_text().splitlines():
                if SHARED_MEMORY in line:
                    inodes.add(int(line.split()[4]))
    found: set[Path] = set()
    for path in Path(SHARED_MEMORY).iterdir() if inodes else ():
        with contextlib.suppress(OSError):
            if path.name.startswith(SEGMENT_PREFIXES) and path.stat().st_ino in inodes:
                found.add(path)
    return found


STOP_S = 15.0
"""Time limit of a stop before a process is killed, in addition to its drain time."""
GRACE_S = 3.0
"""Time limit of its child processes after its end, to remove shared memory."""
KILL_S = 30.0
"""Time limit of the end of killed processes."""
POLL_S = 0.05
LOG_LINES = 12
"""Last lines of a log shown when its process ends during start-up."""
LOG_BYTES = 2**18
"""Part of a log that is read."""
RAISED = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)")
"""The last line of a traceback, printed or logged."""
CAUSES_MAX = 3
ERROR_CHARS_MAX = 200
START_TIMEOUT_NS = 120 * NS_PER_S
PRIVATE_UMASK = 0o077
"""Umask of every part: only its owner can open its logs, sockets and files.

vLLM makes the sockets of its KV events, which carry prompts, as the umask says.
"""


@dataclass(slots=True)
class ProcessPart:
    """A process of a deployment."""

    name: str
    """Name in the deployment file."""
    kind: str
    """"pool node", "engine" or "gateway"."""
    command: Command
    """Command to run."""
    health_url: str
    """Answers 200 once the part is ready."""
    log: Path
    """Place where its output goes."""
    leftovers: list[Path] = field(default_factory=list)
    """Files to remove once it is gone; the last component may be a pattern."""
    places: dict[str, str] = field(default_factory=dict)
    """Place where it is reached, such as `{"pd-pool": "127.0.0.1:7100"}`, by name of a part."""
    whole_url: str = ""
    """Answers 200 once the whole deployment is there; only a first start waits for it."""
    warm_up: tuple[str, dict[str, object]] | None = None
    """Request that makes a ready engine do its first, slow work; None for none."""
    stop_s: float = STOP_S
    """Time that it may take to stop before it is killed."""
    start_timeout_ns: int = START_TIMEOUT_NS
    """Time that it may take to become ready."""
    process: subprocess.Popen[bytes] | None = None
    ready_after_s: float | None = None
    _segments: set[Path] = field(default_factory=set)
    _is_clean: bool = False
    _log_start: int = 0
    """Offset of this start's output in the log, bytes."""

    @property
    def pid(self) -> int | None:
        """Process id; None before it was started."""
        return self.process.pid if self.process else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs or before it was started."""
        return self.process.poll() if self.process else None

    def start(self) -> None:
        """Start the process in a new session, so that Ctrl-C reaches only the supervisor."""
        self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log.parent.chmod(0o700)
        self.ready_after_s, self._is_clean = None, False
        with open(self.log, "ab", opener=open_private) as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                self.command.args,
                env=self.command.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=PRIVATE_UMASK,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread of ours holds a lock
            )
        self._segments = set()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all it started; harmless if they are gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def terminate(self, *, with_all: bool = False) -> None:
        """Ask the process to stop.

        Args:
            with_all: The whole deployment stops: a gateway waits for no load balancer to notice.
        """
        if self.process is not None and self.exit_code is None:
            self._look()
            hurries = with_all and self.kind == "gateway" and self.ready_after_s is not None
            self.process.send_signal(signal.SIGINT if hurries else signal.SIGTERM)

    def has_ended(self) -> bool:
        """Return True if the process has ended; all it started may go on."""
        self._look()
        return self.exit_code is not None

    def is_gone(self) -> bool:
        """Return True if the process and all it started have ended."""
        return not self._look() and self.exit_code is not None

    async def stop(self, *, with_all: bool = False) -> None:
        """Stop the process, by force if it takes longer than `stop_s`, and clean up after it.

        Args:
            with_all: See `terminate`.
        """
        if self.process is None:
            return
        self.terminate(with_all=with_all)
        await _within(self.stop_s, self.has_ended)
        await _within(GRACE_S, self.is_gone)
        await self.clean_up()

    async def clean_up(self) -> None:
        """Kill the remaining processes, and remove their files and shared memory."""
        if self.process is None or self._is_clean:
            return
        self._look()
        self.signal(signal.SIGKILL)
        # The kernel may take its time to give a large memory back; others are not held up by that.
        await _within(KILL_S, self.is_gone)
        self._is_clean = True
        found = [path for each in self.leftovers for path in each.parent.glob(each.name)]
        for path in [*found, *self._segments]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _look(self) -> list[int]:
        """Return the remaining processes, and record their shared memory, which they may leave
        behind."""
        left = members(self.process.pid) if self.process else []
        self._segments |= shared_segments(left)
        return left

    def last_words(self) -> str:
        """Return its last log lines after its earlier errors, one of which may be the cause."""
        lines = self._log_lines()
        causes = _errors(lines[:-LOG_LINES])[-CAUSES_MAX:]
        return "\n".join(f"    {line}" for line in [*causes, *lines[-LOG_LINES:]])

    def last_error(self) -> str:
        """The first error of this start's log, else its last line, shortened; "" without a log."""
        lines = self._log_lines()
        found = _errors(lines)[:1] or [line for line in lines if line.strip()][-1:]
        return found[0].strip()[:ERROR_CHARS_MAX] if found else ""

    def _log_lines(self) -> list[str]:
        """The end of what this start has logged."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - LOG_BYTES))
            return log.read().decode(errors="replace").splitlines()
        return []


def _errors(lines: list[str]) -> list[str]:
    """Errors of tracebacks, each once."""
    return list(dict.fromkeys(found[1] for line in lines if (found := RAISED.search(line))))


def open_private(path: str, flags: int) -> int:
    """Opener of files that only their owner can read, independent of the umask and earlier
    permissions."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


async def _within(limit_s: float, done: Callable[[], bool]) -> None:
    """Wait until something is done, or the time is over."""
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:  # noqa: ASYNC110 - processes signal nothing
        await asyncio.sleep(POLL_S)


def how_it_ended(exit_code: int | None, last_error: str) -> str:
    """Return what ended a process, as text; one that a signal ends has logged nothing of it.

    Args:
        exit_code: Negative for a signal.
        last_error: Of its log; "" without one.
    """
    if exit_code is None or exit_code >= 0:
        return f"ended with code {exit_code}" + (f": {last_error}" if last_error else "")
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    causes = "; by somebody, or by the kernel for want of memory (dmesg)"
    return f"was ended by {name}" + (causes if exit_code == -signal.SIGKILL else "")
