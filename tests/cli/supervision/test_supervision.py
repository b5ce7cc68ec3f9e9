"""Parts of a deployment fail, each by itself: real processes, and the control channel of `up`."""

import asyncio
import contextlib
import json
import os
import pwd
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.audit.reading import logs_of, records, verify
from prfaas.audit.settings import AuditSettings
from prfaas.audit.up_audit import NAME
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.main import main
from prfaas.cli.supervision.control import SOCKET_NAME, control_channel
from prfaas.cli.supervision.keeper import KeeperTimes, PartChange, Phase, line_of
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.services import SupervisionTable
from prfaas.errors import EngineError
from tests.cli.tiny_parts import CRASH, QUICK, SILENT, Make, is_running, phase_of, stopped

PATIENCE_S = 100.0

pytestmark = pytest.mark.timeout(300)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def kept(
    *parts: ProcessPart,
    table: SupervisionTable | None = None,
    restart: bool = True,
    times: KeeperTimes = QUICK,
) -> AsyncIterator[tuple[Supervisor, list[PartChange]]]:
    """Parts that were started and are restarted, and all changes of theirs."""
    changes: list[PartChange] = []
    supervisor = Supervisor([list(parts)], changes.append, table, restart=restart, times=times)
    async with stopped(supervisor):
        await supervisor.start()
        yield supervisor, changes


def kill(part: ProcessPart) -> int:
    """Kill the process, and return its id."""
    assert part.process is not None
    os.kill(part.process.pid, signal.SIGKILL)
    return part.process.pid


def pids(*parts: ProcessPart) -> list[int]:
    return [part.process.pid for part in parts if part.process and is_running(part)]


def is_anew(part: ProcessPart, before: int) -> bool:
    return part.process is not None and part.process.pid != before


async def test_a_part_whose_port_is_taken_is_tried_until_it_is_free_and_others_go_on(
    make: Make,
) -> None:
    engine, pool, gateway = make("engine"), make("pool"), make("gateway")
    async with kept(engine, pool, gateway) as (supervisor, changes):
        others = pids(pool, gateway)
        port = int(engine.command.args[4])
        with contextlib.ExitStack() as held:
            kill(engine)
            # Whatever comes first, the next start or this: a start that fails comes in the end.
            await until(lambda: takes(held, port, engine))
            await until(lambda: "already in use" in reason_of(supervisor, "engine"))
            await until(lambda: sum(each.failures > 2 for each in changes) > 0)
            assert pids(pool, gateway) == others
        await until(lambda: phase_of(supervisor, "engine") is Phase.READY)
        assert pids(pool, gateway) == others
        assert {each.part.name for each in changes if each.failures} == {"engine"}


def takes(held: contextlib.ExitStack, port: int, owner: ProcessPart) -> bool:
    """Take a port, killing who has it, if that is the one who should."""
    try:
        held.enter_context(socket.create_server(("127.0.0.1", port)))
    except OSError:
        if is_running(owner):
            kill(owner)
        return False
    return True


def reason_of(supervisor: Supervisor, name: str) -> str:
    return supervisor.keeper(name).change.reason


async def test_a_part_that_hangs_while_starting_holds_up_nobody(make: Make) -> None:
    engine, gateway = make("engine"), make("gateway")
    async with kept(engine, gateway) as (supervisor, _):
        serve, engine.command.args[3] = engine.command.args[3], SILENT
        kill(engine)
        await until(lambda: phase_of(supervisor, "engine") is Phase.STARTING)
        before = kill(gateway)
        await until(lambda: is_anew(gateway, before))
        await until(lambda: phase_of(supervisor, "gateway") is Phase.READY)
        # The engine's two minutes are not over: nothing waited for it.
        assert phase_of(supervisor, "engine") is Phase.STARTING
        engine.command.args[3] = serve
        await supervisor.restart("engine")
        assert phase_of(supervisor, "engine") is Phase.READY


async def test_a_part_that_hangs_while_starting_is_ended_and_tried_again(make: Make) -> None:
    engine = make("engine")
    table = SupervisionTable.model_validate({"start_timeout": "3s"})
    async with kept(engine, table=table) as (supervisor, changes):
        serve, engine.command.args[3] = engine.command.args[3], SILENT
        before = kill(engine)
        await until(lambda: is_anew(engine, before))
        hung = pids(engine)
        engine.command.args[3] = serve
        await until(lambda: bool(hung) and is_anew(engine, hung[0]))
        await until(lambda: phase_of(supervisor, "engine") is Phase.READY)
        assert any("was not ready within 3 s" in each.reason for each in changes)


async def test_a_part_that_fails_again_and_again_is_given_up_with_the_reason(make: Make) -> None:
    engine, gateway = make("engine"), make("gateway")
    table = SupervisionTable(restarts_max=2)
    async with kept(engine, gateway, table=table) as (supervisor, changes):
        other = pids(gateway)
        serve, engine.command.args[3] = engine.command.args[3], CRASH
        kill(engine)
        await until(lambda: phase_of(supervisor, "engine") is Phase.FAILED)
        last = next(each for each in reversed(changes) if each.part is engine)
        line = line_of(last)
        assert "failed 3 times in a row, the last time: it ended with code 3: out of luck" in line
        assert "`prfaas ctl restart engine`" in line
        # The demo's working directory is not that of its user.
        relative = replace(last, part=replace(engine, log=Path("engine.log")))
        assert line_of(relative).endswith(f"; see {Path.cwd() / 'engine.log'}")
        assert pids(gateway) == other
        with pytest.raises(EngineError, match="out of luck"):
            await supervisor.restart("engine")
        engine.command.args[3] = serve
        await supervisor.restart("engine")
        assert phase_of(supervisor, "engine") is Phase.READY


async def test_a_part_that_does_not_answer_is_shown_and_left_running(make: Make) -> None:
    engine = make("engine")
    async with kept(engine, times=replace(QUICK, probe_timeout_s=0.2)) as (supervisor, changes):
        before = pids(engine)
        os.kill(before[0], signal.SIGSTOP)
        await until(lambda: phase_of(supervisor, "engine") is Phase.UNHEALTHY)
        assert any("does not answer" in line_of(each) for each in changes)
        os.kill(before[0], signal.SIGCONT)
        await until(lambda: phase_of(supervisor, "engine") is Phase.READY)
        assert pids(engine) == before


async def test_without_restarts_a_part_that_ends_stays_down_and_the_others_up(make: Make) -> None:
    engine, gateway = make("engine"), make("gateway")
    async with kept(engine, gateway, restart=False) as (supervisor, _):
        other = pids(gateway)
        kill(engine)
        await until(lambda: phase_of(supervisor, "engine") is Phase.FAILED)
        assert pids(gateway) == other
        assert pids(engine) == []
        await supervisor.restart("engine")
        assert is_running(engine)


async def test_restarts_begin_with_the_first_start(make: Make, tmp_path: Path) -> None:
    """A part that crashes in its first start, and starts well in its second."""
    engine, gateway = make("engine"), make("gateway")
    once = f"import pathlib, sys\nif not pathlib.Path({str(tmp_path / 'once')!r}).exists():\n"
    once += f"    pathlib.Path({str(tmp_path / 'once')!r}).touch()\n    sys.exit(3)\n"
    engine.command.args[3] = once + engine.command.args[3]
    async with kept(engine, gateway) as (supervisor, changes):
        await until(lambda: phase_of(supervisor, "engine") is Phase.READY)
        assert [c.phase for c in changes if c.part is gateway] == [Phase.STARTING, Phase.READY]


async def test_a_part_that_hangs_in_its_first_start_does_not_keep_the_others_from_starting(
    make: Make,
) -> None:
    pool, engine, gateway = make("pool", SILENT), make("engine"), make("gateway")
    pool.start_timeout_ns = 10**9
    gateway.whole_url = pool.health_url  # never whole without the pool
    supervisor = Supervisor([[pool], [engine, gateway]], restart=True, times=QUICK)
    async with stopped(supervisor):
        await supervisor.start()
        assert phase_of(supervisor, "engine") is Phase.READY
        assert phase_of(supervisor, "gateway") is Phase.READY
        assert "was not ready within 1 s" in reason_of(supervisor, "pool")


async def test_without_restarts_a_hanging_first_start_ends_with_the_reason(make: Make) -> None:
    pool = make("pool", SILENT)
    pool.start_timeout_ns = 10**9
    supervisor = Supervisor([[pool], [make("engine")]], times=QUICK)
    async with stopped(supervisor):
        with pytest.raises(EngineError, match="pool was not ready within 1 s"):
            await supervisor.start()


async def test_a_process_that_can_not_be_started_is_a_failure_of_its_part_alone(make: Make) -> None:
    engine, gateway = make("engine"), make("gateway")
    async with kept(engine, gateway, table=SupervisionTable(restarts_max=1)) as (supervisor, _):
        engine.command.args[0] = "/nowhere/python"
        kill(engine)
        await until(lambda: phase_of(supervisor, "engine") is Phase.FAILED)
        assert "cannot be started: " in reason_of(supervisor, "engine")
        assert is_running(gateway)


async def test_logs_are_their_owners_alone_and_files_of_parts_too(
    make: Make, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    engine = make("engine")
    engine.command.args[3] = f"open({str(made)!r}, 'w').close()\n" + engine.command.args[3]
    engine.log.parent.mkdir()
    engine.log.touch(0o644)
    before = os.umask(0)
    try:
        async with kept(engine):
            assert mode(engine.log) == 0o600
            assert mode(engine.log.parent) == 0o700
            assert mode(made) == 0o600
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def run_ctl(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """`prfaas ctl` as the shell runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["prfaas", "ctl", *args])
        with pytest.raises(SystemExit) as caught:
            main()
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


async def test_an_operator_sees_parts_and_restarts_one(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    state = tmp_path / ".state" / "site"
    state.mkdir(parents=True, mode=0o755)
    (state / SOCKET_NAME).touch()  # of a killed one
    engine, gateway = make("engine"), make("gateway")
    audit = AuditSettings(tmp_path / "audit", tmp_path / "audit")
    async with kept(engine, gateway, restart=False) as (supervisor, _):

        async def ctl(*args: str) -> tuple[int, str, str]:
            return await asyncio.to_thread(run_ctl, capsys, *args)

        umask = os.umask(0)
        try:
            async with control_channel(supervisor, state, audit):
                assert mode(state / SOCKET_NAME) == 0o600
                other = pids(gateway)
                kill(engine)
                await until(lambda: phase_of(supervisor, "engine") is Phase.FAILED)
                code, output, _ = await ctl("parts")
                assert code == 1
                assert "failed     was ended by SIGKILL" in output.splitlines()[0]
                assert (await ctl("restart", "engine"))[0] == 0
                await until(lambda: phase_of(supervisor, "engine") is Phase.READY)
                code, output, _ = await ctl("parts", "--json")
                assert code == 0
                found = json.loads(output)["parts"]
                assert [part["phase"] for part in found] == ["ready", "ready"]
                assert pids(gateway) == other
                code, _, errors = await ctl("restart", "nobody")
                assert (code, "there are engine, gateway" in errors) == (2, True)
        finally:
            os.umask(umask)
        code, _, errors = await ctl("parts")
        assert (code, "give --file FILE" in errors) == (2, True)
    files = logs_of(audit.folder)[NAME]
    (record,) = [line.fields for line in records(files) if line.kind == "operator"]
    user = f"unix:{pwd.getpwuid(os.getuid()).pw_name}"
    assert (record["operator"], record["action"], record["what"]) == (
        user,
        "restart",
        "part engine",
    )
    assert verify(audit.folder, NAME, files).is_intact
