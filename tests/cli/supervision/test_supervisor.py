"""Starting and stopping processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from prfaas.cli.host import processes
from prfaas.cli.supervision.keeper import Phase
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.errors import ConfigError, EngineError
from tests.cli.tiny_parts import (
    CAUSED,
    CRASH,
    MISTAKE,
    QUICK,
    SERVE,
    SILENT,
    Make,
    is_running,
    living_members,
    phase_of,
    served,
    stopped,
)


async def test_stages_start_one_after_the_other_and_all_become_ready(make: Make) -> None:
    first, second, third = make("pool"), make("engine"), make("gateway")
    seen: list[tuple[str, Phase]] = []
    supervisor = Supervisor(
        [[first], [second, third]],
        lambda change: seen.append((change.part.name, change.phase)),
        times=QUICK,
    )
    async with stopped(supervisor):
        await supervisor.start()
        assert seen[:2] == [("pool", Phase.STARTING), ("pool", Phase.READY)]
        for name in ("engine", "gateway"):
            assert [p for n, p in seen[2:] if n == name] == [Phase.STARTING, Phase.READY]
        assert [is_running(part) for part in supervisor.parts] == [True] * 3
    assert [part.exit_code for part in supervisor.parts] == [-signal.SIGTERM] * 3


async def test_a_part_is_warmed_up_before_it_counts_as_ready(make: Make, tmp_path: Path) -> None:
    part = make("engine")
    part.warm_up = (part.health_url, {"prompt": [1, 2]})
    supervisor = Supervisor([[part]], times=QUICK)
    async with stopped(supervisor):
        await supervisor.start()
        assert (tmp_path / "warm").read_text() == "warmed up\n"


async def test_a_part_that_dies_of_its_first_request_is_told(make: Make) -> None:
    part = make("engine")
    part.warm_up = (part.health_url, {"prompt": [1, 2]})
    part.command.args[-1] = "/nowhere/warm"
    supervisor = Supervisor([[part]], times=QUICK)
    async with stopped(supervisor):
        with pytest.raises(EngineError, match="did not answer its first request") as caught:
            await supervisor.start()
        assert "FileNotFoundError" in str(caught.value)


async def test_a_part_that_finds_a_mistake_is_the_operators_business(make: Make) -> None:
    good, bad, never = make("pool"), make("engine", MISTAKE), make("gateway")
    supervisor = Supervisor([[good, bad], [never]], times=QUICK)
    async with stopped(supervisor):
        with pytest.raises(ConfigError) as caught:
            await supervisor.start()
        assert "engine engine refused to start" in str(caught.value)
        assert "prfaas: name another port" in str(caught.value)
        assert never.process is None


async def test_a_part_that_crashes_shows_the_end_of_its_log(make: Make) -> None:
    supervisor = Supervisor([[make("engine", CRASH)]], times=QUICK)
    async with stopped(supervisor):
        with pytest.raises(EngineError, match="ended with code 3") as caught:
            await supervisor.start()
        assert "out of luck" in str(caught.value)


async def test_the_cause_is_shown_that_lies_above_the_end_of_the_log(make: Make) -> None:
    """As vLLM's does, whose server ends with "See root cause above" and a traceback of its own."""
    part = make("engine", CAUSED)
    part.log.parent.mkdir()
    part.log.write_text("ValueError: of an earlier start\n")
    supervisor = Supervisor([[part]], times=QUICK)
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
        supervisor = Supervisor([[first], [never]], times=QUICK)
        async with stopped(supervisor):
            with pytest.raises(EngineError, match="pool ended with code 3"):
                await supervisor.start()


async def test_a_start_that_is_given_up_leaves_nothing(make: Make) -> None:
    part = make("engine", SILENT)
    supervisor = Supervisor([[part]], times=QUICK)
    async with stopped(supervisor):
        starting = asyncio.create_task(supervisor.start())
        while part.process is None:  # noqa: ASYNC110 - nobody signals the start of a process
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def test_what_does_not_stop_is_killed(make: Make) -> None:
    stubborn, good = make("engine", SERVE, "stubborn"), make("gateway")
    stubborn.stop_s = good.stop_s = 3.0  # the good one ends within it
    supervisor = Supervisor([[stubborn, good]], times=QUICK)
    async with stopped(supervisor):
        await supervisor.start()
    assert stubborn.exit_code == -signal.SIGKILL
    assert good.exit_code == -signal.SIGTERM


async def test_what_a_part_started_goes_with_it(make: Make) -> None:
    parent = make("engine", SERVE, "parent")
    supervisor = Supervisor([[parent]], times=QUICK)
    async with stopped(supervisor):
        await supervisor.start()
        assert parent.process is not None
        assert len(living_members(parent.process.pid)) == 2


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
    supervisor = Supervisor([[part]], times=QUICK)
    async with stopped(supervisor):
        await supervisor.start()
        assert part.process is not None
        async with asyncio.timeout(10):
            while "mapped" not in part.log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        os.kill(part.process.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while phase_of(supervisor, "engine") is not Phase.FAILED:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert living_members(part.process.pid) == []
        assert not segment.exists()


async def test_a_part_can_be_added_and_removed_while_the_others_run(make: Make) -> None:
    first, second = make("first"), make("second")
    supervisor = Supervisor([[first]], times=QUICK)
    async with stopped(supervisor):
        await supervisor.start()
        supervisor.add(second)
        while {change.phase for change in supervisor.changes()} != {Phase.READY}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        kept = first.pid
        await supervisor.remove("second")
        assert [part.name for part in supervisor.parts] == ["first"]
        assert second.exit_code is not None
        assert (first.pid, first.exit_code) == (kept, None)
        with pytest.raises(KeyError):
            supervisor.ask_restart("second")
