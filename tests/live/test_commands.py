"""The commands as a user starts and stops them.

With timing engines for each change: `tests/cli/supervision/test_exit_codes.py` and
`tests/cli/deploy/test_timing_demo.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.deployments import LAPTOP, placed
from tests.live.conftest import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    # The loop that carries the other tests' link: it may not stand still meanwhile.
    pytest.mark.asyncio(loop_scope="session"),
]


def processes_of(marker: str) -> list[str]:
    """Command lines of running processes that mention `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


def descendants(pid: int) -> set[int]:
    """Processes below a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state parent ...; a name may hold spaces and brackets.
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
    found, new = set[int](), {pid}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in found} - found
    return found - {pid}


def shared_memory(pids: set[int]) -> set[Path]:
    """Segments, semaphores and engines' files that some processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, slash, name = line.partition(" /dev/shm/")
                if slash and not name.endswith(" (deleted)"):
                    found.add(Path("/dev/shm") / name)  # noqa: S108
    return found


async def test_ctrl_c_during_start_leaves_nothing_running(tmp_path: Path) -> None:
    file, _ = placed(LAPTOP, tmp_path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prfaas", "up", str(file), stdout=asyncio.subprocess.PIPE
    )
    mapped: set[Path] = set()

    async def engines_share_memory() -> bool:
        mapped.update(shared_memory(descendants(process.pid)))
        return any(path.name.startswith("psm_") for path in mapped)

    await until(engines_share_memory, timeout_s=240)
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    assert process.returncode != 0
    assert b"stopping" in output
    assert processes_of(str(tmp_path)) == []
    assert [path for path in mapped if path.exists()] == []
