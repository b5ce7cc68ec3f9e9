"""Probes of thousands of engines: few at a time, spread out, and no engine waits for a hung one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest

from prfaas.config.clusters import ClusterRole
from prfaas.core.resilience.quarantine import Guards
from prfaas.gateway.engines import engine_probes
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.engines.engine_probes import (
    AT_ONCE_MAX,
    HUNG_AT_ONCE_MAX,
    POLL_MAX_S,
    EngineProbes,
)
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.part_states import EngineStates
from prfaas.tasks import slot_of
from tests.gateway.conftest import until

NUM_ENGINES = 2000


class Answer:
    """Stands for the answer of `aiohttp`."""

    status = 200


class FakeEngines:
    """Engines without sockets; it is the session and the driver too."""

    def __init__(self, hung: set[str]) -> None:
        self.hung = hung
        self.looks: Counter[str] = Counter()
        self.in_flight: Counter[bool] = Counter()
        """Requests to engines that answer and to those that hang."""
        self.most: Counter[bool] = Counter()
        self.ready: set[str] = set()
        self.states = EngineStates({})

    @asynccontextmanager
    async def get(self, url: str, **_: Any) -> AsyncIterator[Answer]:
        name, _slash, path = url.partition("/")
        is_hung = name in self.hung
        self.in_flight[is_hung] += 1
        self.most[is_hung] = max(self.most[is_hung], self.in_flight[is_hung])
        try:
            await (asyncio.Event().wait() if is_hung else asyncio.sleep(0))
            self.looks[name] += path == "health"
            yield Answer()
        finally:
            self.in_flight[is_hung] -= 1

    def engine_ready(self, name: str, *_: object) -> None:
        self.ready.add(name)


async def answer(_: object) -> bytes:
    return b'{"data": [{"id": "m", "max_model_len": 9}]}'


@asynccontextmanager
async def probing(fake: FakeEngines, limit_s: float) -> AsyncIterator[EngineProbes]:
    engines = {
        name: Engine(name, name, ClusterRole.PD, "pool")
        for name in (f"e{n}" for n in range(NUM_ENGINES))
    }
    driver, guards = cast(Driver, fake), cast(Guards, None)
    probes = EngineProbes(engines, "m", driver, guards, limit_s, 0.01)
    probes.start(cast(aiohttp.ClientSession, fake))
    yield probes
    await probes.close()


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probes, "read_answer", answer)


async def test_few_of_2000_engines_are_probed_at_a_time() -> None:
    fake = FakeEngines(set())
    async with probing(fake, limit_s=60.0) as probes:
        await probes.all_probed()
        assert len(fake.ready) == NUM_ENGINES
        assert fake.most[False] <= AT_ONCE_MAX


async def test_engines_that_hang_delay_no_probe_of_the_others() -> None:
    """More of them than there are slots: with one look of each under way for a minute, the others
    are looked at again and again."""
    hung = {f"e{n}" for n in range(2 * AT_ONCE_MAX)}
    fake = FakeEngines(hung)
    async with probing(fake, limit_s=60.0):
        well = NUM_ENGINES - len(hung)
        await until(lambda: sum(n >= 2 for n in fake.looks.values()) == well)
        assert fake.most[False] <= AT_ONCE_MAX
        assert not fake.ready & hung


async def test_engines_known_to_hang_are_probed_some_at_a_time() -> None:
    fake = FakeEngines({f"e{n}" for n in range(NUM_ENGINES)})
    async with probing(fake, limit_s=0.5) as probes:
        for engine in probes._engines.values():
            engine.num_missed = 1
        await until(probes._hung.locked)
        await until(lambda: 0 < fake.in_flight[True] <= HUNG_AT_ONCE_MAX)
        fake.most.clear()
        await until(lambda: all(e.num_missed > 1 for e in probes._engines.values()))
        assert fake.most[True] <= HUNG_AT_ONCE_MAX


async def test_probes_that_began_together_spread_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: set[float] = set()
    sleep: Callable[[float], Any] = asyncio.sleep

    async def noted(pause_s: float) -> None:
        if pause_s > POLL_MAX_S / 2:
            pauses.add(pause_s)
        await sleep(pause_s)

    monkeypatch.setattr(asyncio, "sleep", noted)
    fake = FakeEngines(set())
    async with probing(fake, limit_s=60.0) as probes:
        await probes.all_probed()
        await until(lambda: len(pauses) > NUM_ENGINES // 2)
    assert max(pauses) <= 1.1 * POLL_MAX_S
    assert max(pauses) - min(pauses) > 0.1 * POLL_MAX_S


async def test_a_slot_that_is_held_too_long_is_another_ones() -> None:
    slots, over = asyncio.Semaphore(1), asyncio.Event()

    async def slow() -> None:
        async with slot_of(slots, 0.01):
            await over.wait()

    task = asyncio.create_task(slow())
    await until(slots.locked)
    async with slot_of(slots, 60.0):
        over.set()
        await task
        assert slots.locked()
    assert not slots.locked()
