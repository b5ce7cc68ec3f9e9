"""Tiny processes that behave, and tiny ones that do not, as parts of a deployment."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp.web

from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.supervision.keeper import KeeperTimes, Phase
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.engines.launch import Command
from tests.ports import free_port

QUICK = KeeperTimes(poll_s=0.01, probe_s=0.01, first_delay_s=0.01)
"""Frequent checks, and short waits between starts and between probes."""
SERVE = """
import http.server, os, signal, subprocess, sys
port, manner = int(sys.argv[1]), sys.argv[2]
if manner == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if manner == "parent":
    subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        open(sys.argv[3], "a").write("warmed up\\n")
        self.send_response(200); self.end_headers()
    def log_message(self, *args):
        pass
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
MISTAKE = "import sys; print('prfaas: name another port', file=sys.stderr); sys.exit(2)"
CRASH = "print('out of luck'); raise SystemExit(3)"
CAUSED = """
print("(Core pid=7) ERROR 11-22 02:16:39 [core.py:15] OSError: no room in shared memory")
print("OSError: no room in shared memory\\n" + "at a loss\\n" * 12, end="")
raise SystemExit(3)
"""
SILENT = "import signal; signal.pause()"


Make = Callable[..., ProcessPart]


def maker(local: Path) -> Make:
    """Makes parts whose files lie in one folder."""
    taken: set[int] = set()

    def part(name: str, code: str = SERVE, manner: str = "good") -> ProcessPart:
        # A port that was let go may be found again.
        port = next(port for port in iter(free_port, 0) if port not in taken)
        taken.add(port)
        args = [sys.executable, "-S", "-c", code, str(port), manner, str(local / "warm")]
        leftover = local / f"{name}.mmap"
        leftover.write_text("rows")
        return ProcessPart(
            name=name,
            kind="engine",
            command=Command(args, dict(os.environ)),
            health_url=f"http://127.0.0.1:{port}/health",
            log=local / "logs" / f"{name}.log",
            leftovers=[leftover],
            stop_s=5.0,
        )

    return part


@contextlib.asynccontextmanager
async def stopped(supervisor: Supervisor) -> AsyncIterator[None]:
    """Stop whatever runs, and see that nothing is left of it."""
    try:
        yield
    finally:
        groups = [part.process.pid for part in supervisor.parts if part.process]
        await supervisor.stop()
        assert [part.name for part in supervisor.parts if part.process and is_running(part)] == []
        async with asyncio.timeout(5):
            while any(living_members(group) for group in groups):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert [path for part in supervisor.parts for path in part.leftovers if path.exists()] == [
            path for part in supervisor.parts if not part.process for path in part.leftovers
        ]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    """A server that answers everything with 200."""
    app = aiohttp.web.Application()
    app.router.add_get("/health", _ok)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/health"
    finally:
        await runner.cleanup()


async def _ok(_: aiohttp.web.Request) -> aiohttp.web.Response:
    return aiohttp.web.Response()


def is_running(part: ProcessPart) -> bool:
    return part.exit_code is None


def phase_of(supervisor: Supervisor, name: str) -> Phase:
    return supervisor.keeper(name).change.phase


def living_members(group: int) -> list[int]:
    """Processes of a process group that are not dead already."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return members
