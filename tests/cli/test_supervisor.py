"""Starting and stopping processes: tiny ones that behave, and tiny ones that do not."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest

from prfaas.cli import processes
from prfaas.cli.deploy import watch
from prfaas.cli.processes import Part, Supervisor
from prfaas.engines.launch import Command
from prfaas.errors import ConfigError, EngineError
from tests.ports import free_port

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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    monkeypatch.setattr(processes, "STOP_S", 5.0)


Make = Callable[..., Part]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    taken: set[int] = set()

    def part(name: str, code: str = SERVE, manner: str = "good") -> Part:
        # A port that was let go may be found again.
        port = next(port for port in iter(free_port, 0) if port not in taken)
        taken.add(port)
        args = [sys.executable, "-S", "-c", code, str(port), manner, str(tmp_path / "warm")]
        leftover = tmp_path / f"{name}.mmap"
        leftover.write_text("rows")
        return Part(
            name=name,
            kind="engine",
            command=Command(args, dict(os.environ)),
            health_url=f"http://127.0.0.1:{port}/health",
            log=tmp_path / "logs" / f"{name}.log",
            leftovers=[leftover],
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


def is_running(part: Part) -> bool:
    return part.exit_code is None


def living_members(group: int) -> list[int]:
    """Processes of a process group that are not dead already."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return members


async def test_stages_start_one_after_the_other_and_all_become_ready(make: Make) -> None:
    first, second, third = make("pool"), make("engine"), make("gateway")
    seen: list[tuple[str, bool]] = []
    supervisor = Supervisor(
        [[first], [second, third]],
        lambda part: seen.append((part.name, part.ready_after_s is not None)),
    )
    async with stopped(supervisor):
        await supervisor.start()
        assert seen[:2] == [("pool", False), ("pool", True)]
        assert seen[2:4] == [("engine", False), ("gateway", False)]
        assert sorted(seen[4:]) == [("engine", True), ("gateway", True)]
        assert [is_running(part) for part in supervisor.parts] == [True] * 3
    assert [part.exit_code for part in supervisor.parts] == [-signal.SIGTERM] * 3


async def test_a_part_is_warmed_up_before_it_counts_as_ready(make: Make, tmp_path: Path) -> None:
    part = make("engine")
    part.warm_up = (part.health_url, {"prompt": [1, 2]})
    supervisor = Supervisor([[part]])
    async with stopped(supervisor):
        await supervisor.start()
        assert (tmp_path / "warm").read_text() == "warmed up\n"


async def test_a_part_that_dies_of_its_first_request_is_told(make: Make) -> None:
    part = make("engine")
    part.warm_up = (part.health_url, {"prompt": [1, 2]})
    part.command.args[-1] = "/nowhere/warm"
    supervisor = Supervisor([[part]])
    async with stopped(supervisor):
        with pytest.raises(EngineError, match="did not answer its first request") as caught:
            await supervisor.start()
        assert "FileNotFoundError" in str(caught.value)


async def test_a_part_that_finds_a_mistake_is_the_operators_business(make: Make) -> None:
    good, bad, never = make("pool"), make("engine", MISTAKE), make("gateway")
    supervisor = Supervisor([[good, bad], [never]])
    async with stopped(supervisor):
        with pytest.raises(ConfigError) as caught:
            await supervisor.start()
        assert "engine engine refused to start" in str(caught.value)
        assert "prfaas: name another port" in str(caught.value)
        assert never.process is None


async def test_a_part_that_crashes_shows_the_end_of_its_log(make: Make) -> None:
    supervisor = Supervisor([[make("engine", CRASH)]])
    async with stopped(supervisor):
        with pytest.raises(EngineError, match="ended with code 3") as caught:
            await supervisor.start()
        assert "out of luck" in str(caught.value)


async def test_the_cause_is_shown_that_lies_above_the_end_of_the_log(make: Make) -> None:
    """As vLLM's does, whose server ends with "See root cause above" and a traceback of its own."""
    part = make("engine", CAUSED)
    part.log.parent.mkdir()
    part.log.write_text("ValueError: of an earlier start\n")
    supervisor = Supervisor([[part]])
    async with stopped(supervisor):
        with pytest.raises(EngineError) as caught:
            await supervisor.start()
        first, *others = str(caught.value).splitlines()[1:]
    assert first.strip() == "OSError: no room in shared memory"
    assert [line.strip() for line in others] == ["at a loss"] * processes.LOG_LINES


async def test_a_start_ends_when_a_part_that_was_ready_ends(make: Make) -> None:
    first, never = make("pool", CRASH), make("gateway", SILENT)
    async with served() as url:
        first.health_url = url  # somebody else answers in its place
        supervisor = Supervisor([[first], [never]])
        async with stopped(supervisor):
            with pytest.raises(EngineError, match="pool ended with code 3"):
                await supervisor.start()


async def test_a_start_that_is_given_up_leaves_nothing(make: Make) -> None:
    part = make("engine", SILENT)
    supervisor = Supervisor([[part]])
    async with stopped(supervisor):
        starting = asyncio.create_task(supervisor.start())
        while part.process is None:  # noqa: ASYNC110 - nobody signals the start of a process
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def test_what_does_not_stop_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_S", 0.2)
    stubborn, good = make("engine", SERVE, "stubborn"), make("gateway")
    supervisor = Supervisor([[stubborn, good]])
    async with stopped(supervisor):
        await supervisor.start()
    assert stubborn.exit_code == -signal.SIGKILL
    assert good.exit_code == -signal.SIGTERM


async def test_what_a_part_started_goes_with_it(make: Make) -> None:
    parent = make("engine", SERVE, "parent")
    supervisor = Supervisor([[parent]])
    async with stopped(supervisor):
        await supervisor.start()
        assert parent.process is not None
        assert len(living_members(parent.process.pid)) == 2


async def die(part: Part) -> None:
    url = part.health_url.replace("/health", "/die")
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(aiohttp.ClientError):
            await session.get(url)


async def test_an_end_is_reported_once(make: Make) -> None:
    one, other = make("one"), make("other")
    supervisor = Supervisor([[one, other]])
    async with stopped(supervisor):
        await supervisor.start()
        await die(other)
        assert await supervisor.died() is other
        assert other.exit_code == 7
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.died(), 0.1)
        await die(one)
        assert await supervisor.died() is one


async def test_a_restarted_part_is_another_process_and_can_end_again(make: Make) -> None:
    part = make("engine")
    supervisor = Supervisor([[part]])
    async with stopped(supervisor):
        await supervisor.start()
        first = part.process
        await die(part)
        await supervisor.died()
        await supervisor.restart("engine")
        assert part.process is not first
        assert is_running(part)
        assert part.log.read_text().count("serving") == 2
        await die(part)
        assert await supervisor.died() is part


async def test_who_waits_for_a_restarted_part_can_be_stopped(make: Make) -> None:
    part = make("engine")
    supervisor, stop = Supervisor([[part]]), asyncio.Event()
    async with stopped(supervisor):
        await supervisor.start()
        first, part.command.args[3] = part.process, SILENT
        watching = asyncio.create_task(watch(supervisor, stop, restart=True))
        await die(part)
        async with asyncio.timeout(5):
            while part.process is first:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not watching.done()
        stop.set()
        async with asyncio.timeout(5):
            await watching


async def test_a_part_that_is_killed_takes_its_children_and_shared_memory_with_it(
    make: Make,
) -> None:
    segment = Path("/dev/shm") / f"psm_prfaas_test_{os.getpid()}"  # noqa: S108
    hold = f"""
import mmap, os, signal, subprocess, sys
if sys.argv[2] != "child":
    open({str(segment)!r}, "wb").write(bytes(4096))
    subprocess.Popen([sys.executable, "-S", "-c", open("/proc/self/cmdline").read().split("\\0")[3],
                      sys.argv[1], "child"])
    {SERVE.replace(chr(10), chr(10) + "    ")}
memory = mmap.mmap(os.open({str(segment)!r}, os.O_RDWR), 4096)
print("mapped", flush=True)
signal.pause()
"""
    part = make("engine", hold)
    supervisor = Supervisor([[part]])
    async with stopped(supervisor):
        await supervisor.start()
        assert part.process is not None
        async with asyncio.timeout(10):
            while "mapped" not in part.log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        os.kill(part.process.pid, signal.SIGKILL)
        assert await supervisor.died() is part
        assert living_members(part.process.pid) == []
        assert not segment.exists()
