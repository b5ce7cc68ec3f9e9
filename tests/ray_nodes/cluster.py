"""Start and end of a Ray cluster for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'prfaas[ray]'",
)
SETTINGS = {
    # Ray replaces a loopback address by that of the host's network, unless clusters are off.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_NODE_IP_ADDRESS": "127.0.0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_raylet_start_wait_time_s": "150",
}


@dataclass(frozen=True)
class RayNodes:
    """A running cluster.

    Attributes:
        address: HOST:PORT of its head.
        ids: Ids of its nodes, the head first.
        env: Environment of processes that connect to it.
    """

    address: str
    ids: list[str]
    env: dict[str, str]
    process: subprocess.Popen[str]

    def kill(self, number: int) -> None:
        """Kill a node with everything on it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        assert json.loads(self.process.stdout.readline()) == {"killed": number}


@contextlib.contextmanager
def ray_nodes(*cpus: int) -> Iterator[RayNodes]:
    """A cluster with a node for each number of CPUs; the first node is the head."""
    # Paths of its sockets are long, and pytest's folders as well.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    token = folder / "token"
    token.write_text("f" * 64)
    token.chmod(0o600)
    env = {**os.environ, **SETTINGS, "RAY_AUTH_TOKEN_PATH": str(token)}
    command = [sys.executable, "-m", "tests.ray_nodes.program", str(folder), *map(str, cpus)]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "errors").read_text()
        found = json.loads(line)
        yield RayNodes(found["address"], found["ids"], env, process)
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            shutil.rmtree(folder, ignore_errors=True)
