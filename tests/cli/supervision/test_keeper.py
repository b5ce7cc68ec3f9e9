"""One part kept: when it is started again, and when it is given up."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cli.host.processes import how_it_ended
from prfaas.cli.supervision.keeper import Keeper, PartChange, Phase, restart_delay_s
from prfaas.config.services import SupervisionTable
from tests.cli.tiny_parts import QUICK, served


class ScriptedPart:
    """A part without a process; a start while one runs is an error."""

    def __init__(self, url: str) -> None:
        self.exit_code: int | None = None
        self.is_running = False
        self.num_starts = self.num_stops = 0
        self.on_clean_up: Callable[[], None] = lambda: None
        self.health_url, self.warm_up = url, None
        self.start_timeout_ns, self.pid = 10**15, 1

    def start(self) -> None:
        assert not self.is_running
        self.num_starts, self.exit_code, self.is_running = self.num_starts + 1, None, True

    def die(self) -> None:
        self.exit_code = 1 if self.exit_code is None else self.exit_code

    async def stop(self) -> None:
        self.num_stops, self.exit_code = self.num_stops + 1, -15
        await self.clean_up()

    async def clean_up(self) -> None:
        await asyncio.sleep(0)
        self.on_clean_up()
        self.is_running = False

    def last_error(self) -> str:
        return ""

    last_words = last_error


@contextlib.asynccontextmanager
async def kept(
    restarts_max: int = 2, stable_s: float = 1e6
) -> AsyncIterator[tuple[ScriptedPart, Keeper, list[PartChange]]]:
    changes: list[PartChange] = []
    times = replace(QUICK, poll_s=0.001, first_delay_s=0.001, stable_s=stable_s)
    table = SupervisionTable(restarts_max=restarts_max)
    async with served() as url, aiohttp.ClientSession() as http:
        part: Any = ScriptedPart(url)
        keeper = Keeper(part, table, http, changes.append, restart=True, times=times)
        task = asyncio.create_task(keeper.run())
        try:
            async with asyncio.timeout(50):
                yield part, keeper, changes
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def phase(keeper: Keeper, wanted: Phase) -> None:
    while keeper.change.phase is not wanted:  # noqa: ASYNC110 - phases come and go between polls
        await asyncio.sleep(0)


async def test_a_restart_that_is_asked_for_during_a_clean_up_starts_the_part_once() -> None:
    async with kept() as (part, keeper, changes):
        await phase(keeper, Phase.READY)
        part.on_clean_up = keeper.restart
        part.die()
        while part.num_starts < 2:  # noqa: ASYNC110 - a process signals nothing
            await asyncio.sleep(0)
        await phase(keeper, Phase.READY)
        assert [each.phase for each in changes][-3:] == [
            Phase.ENDING, Phase.STARTING, Phase.READY,
        ]  # fmt: skip
        assert (part.num_starts, part.num_stops, keeper.change.failures) == (2, 0, 0)


async def test_a_part_that_fails_in_a_row_is_given_up_until_it_is_asked_for() -> None:
    async with kept() as (part, keeper, changes):
        for number in (1, 2, 3):
            await phase(keeper, Phase.READY)
            part.die()
            await phase(keeper, Phase.WAITING if number < 3 else Phase.FAILED)
            assert (keeper.change.failures, keeper.change.pid) == (number, None)
        assert keeper.change.due_in_s is None
        assert part.num_starts == 3
        keeper.restart()
        await phase(keeper, Phase.READY)
        assert (keeper.change.failures, keeper.change.reason) == (0, "was asked to restart")
        assert all(each.due_in_s is not None for each in changes if each.phase is Phase.WAITING)


async def test_a_part_that_was_ready_for_long_starts_the_count_anew() -> None:
    async with kept(stable_s=0.0) as (part, keeper, _):
        for _ in range(6):
            await phase(keeper, Phase.READY)
            part.die()
            await phase(keeper, Phase.WAITING)
            assert keeper.change.failures == 1


@pytest.mark.parametrize("seed", range(20))
async def test_a_part_is_started_only_while_nothing_runs(seed: int) -> None:
    chance = random.Random(seed)
    async with kept(restarts_max=1) as (part, keeper, changes):
        for _ in range(40):
            chance.choice((part.die, keeper.restart, keeper.restart, lambda: None))()
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
        keeper.restart()
        await phase(keeper, Phase.READY)
        assert max(each.failures for each in changes) <= 2


@given(st.integers(1, 10**6), st.floats(1e-3, 1e3))
def test_a_wait_doubles_is_bounded_and_left_to_chance_by_half(
    failures: int, longest: float
) -> None:
    most = min(longest, 2.0 ** min(failures - 1, 100))
    assert most / 2 <= restart_delay_s(failures, 1.0, longest) <= most


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (1, "ended with code 1: RuntimeError: out of blocks"),
        (-9, "was ended by SIGKILL; by somebody, or by the kernel for want of memory (dmesg)"),
        (-11, "was ended by SIGSEGV"),
        (-99, "was ended by signal 99"),
    ],
)
def test_a_signal_is_the_reason_and_no_line_of_the_log(exit_code: int, expected: str) -> None:
    assert how_it_ended(exit_code, "RuntimeError: out of blocks") == expected
