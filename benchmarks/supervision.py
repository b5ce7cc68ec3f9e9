"""Parts of `prfaas up --restart` fail: what comes back, how soon, and who else goes down with them.

    python -m benchmarks.supervision

Runs the deployment of `examples/timing.toml` (two pool nodes, four timing engines, a gateway: real
processes) three times: a gateway is killed; an engine is killed and its port taken for HOLD_S; an
engine is killed, its next process stopped (SIGSTOP) while it starts, and then the gateway killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.deployments import TIMING, placed

LIMIT_S = 60.0
HOLD_S = 15.0
ENGINE, GATEWAY = "engine timing --engine pd-1=", "prfaas gateway"


@dataclass
class Running:
    """A deployment that runs."""

    process: subprocess.Popen[bytes]
    url: str

    def pids(self) -> dict[int, str]:
        """Command lines of its parts by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = line
        return found

    def pid(self, mark: str) -> int | None:
        """Process whose command line has that."""
        return next((pid for pid, line in self.pids().items() if mark in line), None)

    def kill(self, mark: str) -> int:
        """SIGKILL; the process id."""
        pid = self.pid(mark)
        if pid is None:
            raise SystemExit(f"no process has {mark!r}")
        os.kill(pid, signal.SIGKILL)
        return pid

    def answers(self, page: str) -> bool:
        """Return True if a page of the gateway answers 200."""
        try:
            with urllib.request.urlopen(f"{self.url}{page}", timeout=2):  # noqa: S310
                return True
        except (urllib.error.URLError, OSError):
            return False


@contextlib.contextmanager
def running() -> Iterator[Running]:
    """A deployment for as long as the context is open."""
    with tempfile.TemporaryDirectory() as local:
        file, _ = placed(TIMING, Path(local))
        log = Path(local) / "up.log"
        command = [sys.executable, "-m", "prfaas", "up", str(file), "--restart"]
        with log.open("wb") as output, subprocess.Popen(command, stdout=output) as process:
            try:
                wait(lambda: "ready at http" in log.read_text(), 300)
                found = re.search(r"ready at (http://\S+)/v1", log.read_text())
                yield Running(process, found[1] if found else "")
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()


def wait(condition: Callable[[], object], limit_s: float = LIMIT_S) -> float | None:
    """Seconds until a condition holds; None if it does not within the limit."""
    began = time.monotonic()
    while time.monotonic() < began + limit_s:
        if condition():
            return time.monotonic() - began
        time.sleep(0.02)
    return None


def shown(seconds: float | None) -> str:
    return f"not within {LIMIT_S:g} s" if seconds is None else f"{seconds:.1f} s"


def kill_gateway() -> None:
    with running() as site:
        site.kill(GATEWAY)
        print(f"gateway killed: back after {shown(wait(lambda: site.answers('/version')))}")


def take_port() -> None:
    with running() as site:
        line = site.pids()[site.pid(ENGINE) or 0]
        port = int(re.findall(r"--engine pd-1=\S+:(\d+)", line)[0])
        others = set(site.pids()) - {site.kill(ENGINE)}
        with contextlib.ExitStack() as held:
            wait(lambda: _bound(held, port))
            until = time.monotonic() + HOLD_S
            while time.monotonic() < until and site.process.poll() is None:
                time.sleep(0.1)
            alive = len(others & set(site.pids()))
            print(
                f"engine killed, its port taken for {HOLD_S:g} s: "
                f"{alive} of {len(others)} other parts run on, prfaas up "
                f"{'runs' if site.process.poll() is None else 'has ended'}"
            )
        back = wait(lambda: site.answers("/health?full=1")) if alive else None
        print(f"  the port is free again: all parts there after {shown(back)}")


def _bound(held: contextlib.ExitStack, port: int) -> bool:
    try:
        held.enter_context(socket.create_server(("127.0.0.1", port)))
    except OSError:
        return False
    return True


def hang() -> None:
    with running() as site:
        before = site.kill(ENGINE)
        wait(lambda: site.pid(ENGINE) not in (None, before))
        hung = site.pid(ENGINE)
        if hung is None:
            raise SystemExit("the engine was not started anew")
        os.kill(hung, signal.SIGSTOP)
        site.kill(GATEWAY)
        back = wait(lambda: site.answers("/version"))
        print(f"engine hangs while starting, gateway killed: gateway back after {shown(back)}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung, signal.SIGCONT)


if __name__ == "__main__":
    kill_gateway()
    take_port()
    hang()
