"""Engines that come and go at random under requests, listed by an API server that misbehaves.

    python -m tests.gateway.churn --engines 200 --events 1000 --rate 20

prints the requests, the errors, the longest time from ready to usable, and what the gateway still
knows of engines that have left.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from prfaas.config.membership import KubernetesTable
from prfaas.core.dispatch.types import Routed
from prfaas.core.membership.members import State
from prfaas.membership.kubernetes import Kubernetes, WatchTiming
from tests.membership.fake_api import FakeApi, Slice, endpoint, endpoint_slice

from .conftest import World, running
from .scripted_engine import ScriptedEngine

LABELS = {"prfaas/kind": "engine", "prfaas/cluster": "pd", "prfaas/pool": "pd-pool"}
ANSWER = "Hello there!"
SERVICE_S = 0.03
"""Longest answer of an engine, so that legs run while engines leave."""
TIMING = WatchTiming(backoff_s=0.01, backoff_max_s=0.1, list_s=0.5, silence_s=0.5)
KINDS = ("add", "add", "remove", "not_ready", "ready", "move", "old", "hang", "cut")


@dataclass
class Churn:
    """One run.

    Attributes:
        world: The gateway and its fixed parts.
        api: Lists the engines.
        most: Engines at a time.
        chance: Of the events.
    """

    world: World
    api: FakeApi
    most: int
    chance: random.Random
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Engines that are not ready, as the gateway knows."""
    started: list[ScriptedEngine] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Engines that got work when they were not to."""
    usable_after_s: list[float] = field(default_factory=list)
    joined_after_s: list[float] = field(default_factory=list)
    """The part of it until the gateway has read the list."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def watch_routes(self) -> None:
        """Check every route against what the gateway has been told."""
        driver = self.world.gateway.driver
        route = driver.route

        def checked(*args: Any) -> Any:
            found = route(*args)
            if isinstance(found[0], Routed) and found[0].prefill in self.away:
                self.late.append(found[0].prefill)
            return found

        driver.route = checked  # type: ignore[assignment,method-assign]

    async def ask(self) -> None:
        """One request."""
        prompt = f"request {next(self._numbers)}"
        status, body = await self.world.post({"prompt": prompt, "max_tokens": 3})
        text = body["choices"][0]["text"] if status == 200 else str(body)
        self.counts["requests"] += 1
        if text != ANSWER:
            self.errors.append(f"{status}: {text}")

    async def event(self) -> None:
        """One random event."""
        kind, names = self.chance.choice(KINDS), sorted(self.engines)
        if kind == "add" and len(names) >= self.most:
            kind = "remove"
        if kind != "add" and not names:
            kind = "add"
        self.counts[kind] += 1
        name = self.chance.choice(names) if names else ""
        await getattr(self, f"_{kind}")(name)

    async def _add(self, _: str) -> None:
        name = f"e{next(self._numbers)}"
        await self._start(name)
        began_s = time.monotonic()
        await self.api.put(self._slice(name))
        await self._until(lambda: self._state(name) is not None)
        self.joined_after_s.append(time.monotonic() - began_s)
        await self._until(lambda: self._state(name) is State.READY)
        self.usable_after_s.append(time.monotonic() - began_s)

    async def _remove(self, name: str) -> None:
        del self.engines[name]
        await self.api.delete(f"slice-{name}")
        await self._until(lambda: self._state(name) in (State.DRAINING, None))
        self.away.add(name)

    async def _not_ready(self, name: str) -> None:
        await self.api.put(self._slice(name, ready=False))
        await self._until(lambda: self._state(name) is State.SEEN)
        self.away.add(name)

    async def _ready(self, name: str) -> None:
        self.away.discard(name)
        await self.api.put(self._slice(name))
        await self._until(lambda: self._state(name) is State.READY)

    async def _move(self, name: str) -> None:
        """A pod with the same name at another address."""
        self.away.discard(name)
        await self._start(name)
        await self.api.put(self._slice(name))
        known, url = self.world.gateway.engines.by_name, self.engines[name].url
        await self._until(lambda: name in known and known[name].url == url)
        await self._until(lambda: self._state(name) is State.READY)

    async def _old(self, _: str) -> None:
        await self.api.expire()

    async def _cut(self, _: str) -> None:
        await self.api.cut()

    async def _hang(self, _: str) -> None:
        self.api.is_hanging = True
        await self.api.cut()
        await asyncio.gather(*(self.ask() for _ in range(3)))
        self.api.is_hanging = False
        await self.api.cut()

    async def _start(self, name: str) -> None:
        engine = ScriptedEngine(name, script=self._serve)
        self.engines[name] = engine
        self.started.append(engine)
        await engine.start()

    async def _serve(
        self, engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await asyncio.sleep(self.chance.uniform(0, SERVICE_S))
        return await engine.answer(request, body)

    def _slice(self, name: str, *, ready: bool = True) -> Slice:
        port = int(self.engines[name].url.rpartition(":")[2])
        pod = endpoint(name, "127.0.0.1", ready=ready)
        return endpoint_slice(f"slice-{name}", LABELS | {"prfaas/name": name}, {"http": port}, pod)

    def _state(self, name: str) -> State | None:
        return self.world.gateway.members.machine.state_of(name)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - nobody signals it
            await asyncio.sleep(0.002)

    async def settled(self) -> None:
        """Wait until all that have left are forgotten."""
        wanted = set(self.engines)
        known = self.world.gateway.engines.by_name
        await self._until(lambda: known.keys() - {"prefill", "decode", "spare"} == wanted)

    def remnants(self) -> set[str]:
        """Knowledge of the gateway about engines that are no more."""
        gateway = self.world.gateway
        there = {*self.engines, "prefill", "decode", "spare"}
        dispatcher = gateway.driver.dispatcher
        known = {
            *gateway.index._sources.keys() - set(gateway.pools.names()),
            *dispatcher._stage_of,
            *(each for each in gateway.guards.breakers if isinstance(each, str)),
            *(name for table in gateway.members.machine.members() for name in (table.name,)),
            *gateway.engines.probes._tasks,
        }
        return known - there - set(gateway.pools.names())


@asynccontextmanager
async def churning(world: World, account: Path, most: int, seed: int) -> AsyncIterator[Churn]:
    """A churn with half of its engines, and requests going on."""
    api = FakeApi(page_items=50)
    await api.start()
    churn = Churn(world, api, most, random.Random(seed))
    churn.watch_routes()
    table = KubernetesTable(url=api.url, namespace="prfaas", service_account=account)
    source, members = Kubernetes(table, TIMING), world.gateway.members
    members.sources.append(source)
    following = asyncio.create_task(source.follow(partial(members.listed, source.name)))
    try:
        for _ in range(most // 2):
            await churn._add("")
        yield churn
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await api.stop()
        for engine in churn.started:
            await engine.stop()


async def run(churn: Churn, num_events: int, *, per_s: float | None = None) -> None:
    """Random events under requests.

    Args:
        churn: The run.
        num_events: Number of events.
        per_s: Requests a second; if None, four clients ask one after the other.
    """
    over = asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            await churn.ask()

    async def clock() -> None:
        assert per_s is not None
        async with asyncio.TaskGroup() as asked:
            while not over.is_set():
                asked.create_task(churn.ask())
                await asyncio.sleep(1 / per_s)

    async with asyncio.TaskGroup() as group:
        clients = [client() for _ in range(4)] if per_s is None else [clock()]
        for each in clients:
            group.create_task(each)
        for _ in range(num_events):
            await churn.event()
        over.set()
    await churn.settled()


async def main(num_engines: int, num_events: int, per_s: float) -> None:
    """Run it once and print what was seen."""
    from prfaas.wire.identity import make_authority, make_identity

    from .conftest import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_authority(home)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(home, name)
        async with (
            running(make_checkpoint(home), home, home / "state", poll_s=2.0) as world,
            churning(world, home, num_engines, 1) as churn,
        ):
            began_s = time.monotonic()
            await run(churn, num_events, per_s=per_s)
            took_s = time.monotonic() - began_s
            joined, usable = sorted(churn.joined_after_s), sorted(churn.usable_after_s)
            probed = sorted(
                u - j for u, j in zip(churn.usable_after_s, churn.joined_after_s, strict=True)
            )
    print(f"events {num_events} in {took_s:.0f} s: {dict(churn.counts)}")
    print(f"engines at most {num_engines}, at the end {len(churn.engines)}")
    print(f"client errors or wrong answers {len(churn.errors)} {churn.errors[:3]}")
    print(f"routes to engines that were not ready {len(churn.late)}")
    for what, times in (("usable", usable), ("joined", joined), ("from joined to usable", probed)):
        shown = f"median {times[len(times) // 2]:.2f} s, p99 {times[len(times) * 99 // 100]:.2f} s"
        print(f"time from listed as ready, {what}: {shown}, longest {times[-1]:.2f} s")
    print(f"left behind of engines that are gone: {sorted(churn.remnants()) or 'nothing'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0)
    given = parser.parse_args()
    asyncio.run(main(given.engines, given.events, given.rate))
