"""The commands as a user starts and stops them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.deployments import LAPTOP, placed
from tests.live.conftest import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(120),
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


def shared_memory() -> set[Path]:
    """Segments, semaphores and engines' files."""
    names = ("psm_*", "sem.mp-*", "vllm_offload_*")
    return {path for name in names for path in Path("/dev/shm").glob(name)}  # noqa: S108


async def test_ctrl_c_during_start_leaves_nothing_running(tmp_path: Path) -> None:
    file, _ = placed(LAPTOP, tmp_path)
    before = shared_memory()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prfaas", "up", str(file), stdout=asyncio.subprocess.PIPE
    )

    async def engines_share_memory() -> bool:
        return any(path.name.startswith("psm_") for path in shared_memory() - before)

    await until(engines_share_memory, timeout_s=90)
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    assert process.returncode != 0
    assert b"stopping" in output
    assert processes_of(str(tmp_path)) == []
    assert shared_memory() - before == set()
