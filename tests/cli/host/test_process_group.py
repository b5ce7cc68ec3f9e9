"""Members of a process group, and what counts as the end of one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from prfaas.cli.host.processes import members

FIRST_THREAD_ENDS = """
import ctypes, platform, signal, sys, threading
threading.Thread(target=signal.pause).start()
print("started", flush=True)
EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]
ctypes.CDLL(None).syscall(EXIT, 0)
"""


def test_a_process_counts_until_its_last_thread_has_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_THREAD_ENDS], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        try:
            # The first thread ends: the kernel calls the process a zombie, yet it holds its files.
            while state_of(child.pid) != "Z":
                os.sched_yield()
            assert members(child.pid) == [child.pid]
        finally:
            os.killpg(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert members(child.pid) == []


def state_of(pid: int) -> str:
    """The letter of a process's state, as proc(5) gives it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
