"""The commands as a user starts and stops them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.live.conftest import LAPTOP, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


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


async def test_ctrl_c_during_start_leaves_nothing_running(tmp_path: Path) -> None:
    file = tmp_path / "laptop.toml"
    file.write_text(
        LAPTOP.read_text()
        .replace(".state/", f"{tmp_path}/")
        .replace("127.0.0.1:8000", "127.0.0.1:0")
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prfaas", "up", str(file), stdout=asyncio.subprocess.PIPE
    )

    async def engines_run() -> bool:
        return len(processes_of("pd-engine")) > 0

    await until(engines_run, timeout_s=60)
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode != 0
    assert processes_of(str(tmp_path)) == []
