"""A directory of member files: one file is one member."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prfaas.core.membership.machine import Membership
from prfaas.core.membership.members import (
    Listed,
    Member,
    MemberKind,
    RefusalCause,
    RefusedEntry,
    Site,
)
from prfaas.membership.folder import Folder
from prfaas.membership.follower import MembershipFollower
from prfaas.membership.port import OnList

POOL = 'kind = "pool"\ncluster = "pd"\naddress = "10.0.0.1:7100"\n'
ENGINE = 'kind = "engine"\ncluster = "pd"\nurl = "http://10.0.0.2:8100"\npool = "pool-a"\n'


class Seen:
    """The last list of a folder."""

    def __init__(self, source: Folder) -> None:
        self.source = source
        self.listed: dict[str, Listed] = {}
        self.refused: dict[str, RefusedEntry] = {}
        self._changed = asyncio.Event()

    def on_list(self, listed: Sequence[Listed], refused: Sequence[RefusedEntry]) -> None:
        self.listed = {each.member.name: each for each in listed}
        self.refused = {each.name: each for each in refused}
        self._changed.set()

    async def change(self) -> None:
        await self._changed.wait()
        self._changed.clear()


@asynccontextmanager
async def following(path: Path) -> AsyncIterator[Seen]:
    seen = Seen(Folder(path, poll_s=0.01))
    task = asyncio.create_task(seen.source.follow(seen.on_list))
    try:
        await seen.change()
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_files_come_change_and_go(tmp_path: Path) -> None:
    write(tmp_path / "pool-a.toml", POOL)
    async with following(tmp_path) as seen:
        assert seen.listed["pool-a"] == Listed(
            Member("pool-a", MemberKind.POOL, "pd", "10.0.0.1:7100")
        )
        write(tmp_path / "e1.toml", ENGINE + "sequences_max = 7\n")
        await seen.change()
        assert seen.listed["e1"].member == Member(
            "e1",
            MemberKind.ENGINE,
            "pd",
            "http://10.0.0.2:8100",
            "pool-a",
            "both",
            settings=(("sequences_max", "7"),),
        )
        write(tmp_path / "e1.toml", ENGINE + "ready = false\n")
        await seen.change()
        assert not seen.listed["e1"].is_ready
        (tmp_path / "e1.toml").unlink()
        await seen.change()
        assert set(seen.listed) == {"pool-a"}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_pipe, "is a pipe, a socket or a device"),
        (_endless, "is a pipe, a socket or a device"),
        (_loop, "cannot be read"),
        (Path.mkdir, "cannot be read"),
        (_text("a = " + "[" * 20_000), "deeper than 64 levels"),
        (_text("a" + ".a" * 20_000 + " = 1"), "more than 64 parts"),
        (_text("sequences_max = " + "9" * 5000), "is no valid TOML"),
        (_text("sequences_max = 0x" + "f" * 5000), "sequences_max: a number of"),
        (_text(ENGINE + "# " + "x" * (64 << 10)), "limit 65536"),
    ],
)
async def test_one_odd_file_is_refused_and_the_others_are_followed(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "pool-a.toml", POOL)
    make(tmp_path / "odd.toml")
    async with following(tmp_path) as seen:
        assert set(seen.listed) == {"pool-a"}
        assert words in seen.refused["odd"].words
        write(tmp_path / "e1.toml", ENGINE)
        await seen.change()
        assert set(seen.listed) == {"pool-a", "e1"}
        assert seen.source.fault == ""


async def test_a_source_that_fails_in_an_unforeseen_way_is_a_fault_and_followed_again() -> None:
    class Odd:
        name, fault, current_at_s, calls = "odd", "", 0.0, 0

        async def follow(self, on_list: OnList) -> None:
            self.calls += 1
            if self.calls == 1:
                raise RecursionError("too deep")
            on_list([Listed(Member("pool-a", MemberKind.POOL, "pd", "10.0.0.1:7100"))], ())
            self.fault = self.waits = ""
            await asyncio.Event().wait()

    class Nobody:
        def __init__(self) -> None:
            self.has_joined = asyncio.Event()

        def join(self, member: Member) -> bool:
            self.has_joined.set()
            return True

        def withhold(self, name: str, *, withheld: bool) -> None: ...
        def leave(self, member: Member) -> None: ...
        def is_idle(self, member: Member) -> bool:
            return True

        def note(self, action: str, what: str, why: str) -> None: ...

    source, nobody = Odd(), Nobody()
    machine = Membership(Site({"pd": ("both",)}, "m"))
    follower = MembershipFollower(machine, nobody, [source], failed_pause_s=0.01)
    follower.start()
    await nobody.has_joined.wait()
    assert source.calls == 2
    assert follower.faults() == {}
    await follower.close()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("e1", "kind = ", "no valid TOML"),
        ("e1", 'kind = "engine"\ncluster = "pd"\n', "needs url and pool"),
        ("e1", 'kind = "boss"\ncluster = "pd"\n', "kind"),
        ("e1", ENGINE + "nonsense = 1\n", "nonsense"),
        ("E.1", ENGINE, "is not named after a name"),
        ("e1", "#" * (64 << 10) + ENGINE, "limit 65536"),
    ],
)
async def test_a_file_that_cannot_be_read_is_refused_alone(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    write(tmp_path / "pool-a.toml", POOL)
    (tmp_path / f"{name}.toml").write_text(text)
    async with following(tmp_path) as seen:
        assert set(seen.listed) == {"pool-a"}
        assert seen.refused[name].reason is RefusalCause.INVALID
        assert words in seen.refused[name].words


async def test_a_member_stays_while_its_file_is_wrong(tmp_path: Path) -> None:
    write(tmp_path / "e1.toml", ENGINE)
    async with following(tmp_path) as seen:
        write(tmp_path / "e1.toml", "kind = ")
        await seen.change()
        assert set(seen.listed) == set(seen.refused) == {"e1"}
        write(tmp_path / "e1.toml", ENGINE)
        await seen.change()
        assert not seen.refused


async def test_a_directory_that_goes_away_takes_nobody_along(tmp_path: Path) -> None:
    folder = tmp_path / "members"
    folder.mkdir()
    write(folder / "e1.toml", ENGINE)
    async with following(folder) as seen:
        folder.rename(tmp_path / "away")
        while not seen.source.fault:  # noqa: ASYNC110 - the test's timeout is the limit
            await asyncio.sleep(0.005)
        assert "cannot be read" in seen.source.fault
        assert set(seen.listed) == {"e1"}
