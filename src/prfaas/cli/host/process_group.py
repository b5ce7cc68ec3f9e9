"""Process groups: their processes, shared memory, and their end with this process.

A vLLM engine is several processes. When the main process is killed, the others continue and
keep their memory; named segments in `/dev/shm` outlive them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from pathlib import Path

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
