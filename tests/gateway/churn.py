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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from prfaas.config.services import KubernetesTable
from prfaas.core.dispatch.types import Routed
from prfaas.core.membership.members import State
from prfaas.gateway.app import Gateway
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
class Churn(ABC):
    """One run.

    Attributes:
        gateway: Sends requests to the engines.
        api: Lists the engines.
        most: Engines at a time.
        chance: Of the events.
    """

    gateway: Gateway
    api: FakeApi
    most: int
    chance: random.Random
    ports: dict[str, dict[str, int]] = field(default_factory=dict)
    """Ports of the engines that are there, by their names."""
    remote: set[str] = field(default_factory=set)
    """Engines that are not ready, as the gateway knows."""
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Engines that got work when they were not to."""
    usable_after_s: list[float] = field(default_factory=list)
    joined_after_s: list[float] = field(default_factory=list)
    """The part of it until the gateway has read the list."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._fixed = self.gateway.engines.by_name.keys() | ()
        self._watch_routes()

    @abstractmethod
    async def ask(self) -> None:
        """One request, whose answer is checked."""

    @abstractmethod
    async def start(self, name: str) -> dict[str, int]:
        """Start an engine; one of this name may be there already.

        Returns:
            Its ports, by their names in an EndpointSlice.
        """

    @abstractmethod
    async def left(self, name: str) -> None:
        """An engine was taken off the list, and the gateway has noticed."""

    @abstractmethod
    async def close(self) -> None:
        """Stop all engines."""

    def _watch_routes(self) -> None:
        """Check every route against what the gateway has been told."""
        driver = self.gateway.driver
        route = driver.route

        def checked(*args: Any) -> Any:
            found = route(*args)
            if isinstance(found[0], Routed):
                used = {found[0].prefill, found[0].decode}
                self.late += [each for each in used if each in self.remote]
            return found

        driver.route = checked  # type: ignore[assignment,method-assign]

    async def event(self) -> None:
        """One random event."""
        kind, names = self.chance.choice(KINDS), sorted(self.ports)
        if kind == "add" and len(names) >= self.most:
            kind = "remove"
        if kind != "add" and not names:
            kind = "add"
        self.counts[kind] += 1
        name = self.chance.choice(names) if names else ""
        await getattr(self, f"_{kind}")(name)

    async def _add(self, _: str) -> None:
        name = f"e{next(self._numbers)}"
        self.ports[name] = await self.start(name)
        began_s = time.monotonic()
        await self.api.put(self._slice(name))
        await self._until(lambda: self._state(name) is not None)
        self.joined_after_s.append(time.monotonic() - began_s)
        await self._until(lambda: self._takes(name))
        self.usable_after_s.append(time.monotonic() - began_s)

    async def _remove(self, name: str) -> None:
        del self.ports[name]
        await self.api.delete(f"slice-{name}")
        await self._until(lambda: self._state(name) in (State.DRAINING, None))
        self.remote.add(name)
        await self.left(name)

    async def _not_ready(self, name: str) -> None:
        await self.api.put(self._slice(name, ready=False))
        await self._until(lambda: self._state(name) is State.SEEN)
        self.remote.add(name)

    async def _ready(self, name: str) -> None:
        self.remote.discard(name)
        await self.api.put(self._slice(name))
        await self._until(lambda: self._takes(name))

    async def _move(self, name: str) -> None:
        """A pod with the same name at another address."""
        ports = await self.start(name)
        self.remote.discard(name)
        self.ports[name] = ports
        await self.api.put(self._slice(name))
        known, url = self.gateway.engines.by_name, f"http://127.0.0.1:{ports['http']}"
        await self._until(lambda: name in known and known[name].url == url)
        await self._until(lambda: self._takes(name))

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

    def _slice(self, name: str, *, ready: bool = True) -> Slice:
        pod, labels = endpoint(name, "127.0.0.1", ready=ready), LABELS | {"prfaas/name": name}
        return endpoint_slice(f"slice-{name}", labels, self.ports[name], pod)

    def _state(self, name: str) -> State | None:
        return self.gateway.members.machine.state_of(name)

    def _takes(self, name: str) -> bool:
        """Return True if the gateway may route requests to an engine."""
        engine = self.gateway.engines.by_name.get(name)
        is_ready = self._state(name) is State.READY
        return is_ready and engine is not None and self.gateway.engines.takes(engine)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - nobody signals it
            await asyncio.sleep(0.002)

    async def settled(self) -> None:
        """Wait until all that have left are forgotten."""
        wanted, known = set(self.ports), self.gateway.engines.by_name
        await self._until(lambda: known.keys() - self._fixed == wanted)

    def remnants(self) -> set[str]:
        """Knowledge of the gateway about engines that are no more."""
        gateway = self.gateway
        there = {*self.ports, *self._fixed}
        dispatcher = gateway.driver.dispatcher
        known = {
            *gateway.index._sources.keys() - set(gateway.pools.names()),
            *dispatcher._stage_of,
            *(each for each in gateway.guards.breakers if isinstance(each, str)),
            *(name for table in gateway.members.machine.members() for name in (table.name,)),
            *gateway.engines.probes._tasks,
        }
        return known - there - set(gateway.pools.names())

    def report(self, num_events: int, took_s: float) -> None:
        """Print what was seen."""
        joined, usable = sorted(self.joined_after_s), sorted(self.usable_after_s)
        pairs = zip(self.usable_after_s, self.joined_after_s, strict=True)
        probed = sorted(usable_s - joined_s for usable_s, joined_s in pairs)
        print(f"events {num_events} in {took_s:.0f} s: {dict(self.counts)}")
        print(f"engines at most {self.most}, at the end {len(self.ports)}")
        print(f"client errors or wrong answers {len(self.errors)} {self.errors[:3]}")
        print(f"routes to engines that were not ready {len(self.late)}")
        whats = ("usable", usable), ("joined", joined), ("from joined to usable", probed)
        for what, times in whats:
            median, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
            shown = f"median {median:.2f} s, p99 {p99:.2f} s, longest {times[-1]:.2f} s"
            print(f"time from listed as ready, {what}: {shown}")
        print(f"left behind of engines that are gone: {sorted(self.remnants()) or 'nothing'}")


@dataclass
class ScriptedChurn(Churn):
    """A run with engines that answer always the same."""

    post: Callable[[object], Awaitable[tuple[int, dict[str, Any]]]] = field(kw_only=True)
    started: list[ScriptedEngine] = field(default_factory=list)

    async def ask(self) -> None:
        """See `Churn`."""
        prompt = f"request {next(self._numbers)}"
        status, body = await self.post({"prompt": prompt, "max_tokens": 3})
        text = body["choices"][0]["text"] if status == 200 else str(body)
        self.counts["requests"] += 1
        if text != ANSWER:
            self.errors.append(f"{status}: {text}")

    async def start(self, name: str) -> dict[str, int]:
        """See `Churn`."""
        engine = ScriptedEngine(name, script=self._serve)
        self.started.append(engine)
        await engine.start()
        return {"http": int(engine.url.rpartition(":")[2])}

    async def left(self, name: str) -> None:
        """See `Churn`."""

    async def close(self) -> None:
        """See `Churn`."""
        for engine in self.started:
            await engine.stop()

    async def _serve(
        self, engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await asyncio.sleep(self.chance.uniform(0, SERVICE_S))
        return await engine.answer(request, body)


@asynccontextmanager
async def churning(world: World, account: Path, most: int, seed: int) -> AsyncIterator[Churn]:
    """A churn of scripted engines."""
    chance, post = random.Random(seed), world.post
    churn = ScriptedChurn(world.gateway, FakeApi(page_items=50), most, chance, post=post)
    async with following(churn, account):
        yield churn


@asynccontextmanager
async def following(churn: Churn, account: Path) -> AsyncIterator[None]:
    """Half of the engines of a churn, as members of the gateway by an API server.

    Args:
        churn: The churn.
        account: Folder with the token of the API server.
    """
    api = churn.api
    await api.start()
    table = KubernetesTable(url=api.url, namespace="prfaas", service_account=account)
    source, members = Kubernetes(table, TIMING), churn.gateway.members
    members.sources.append(source)
    task = asyncio.create_task(source.follow(partial(members.listed, source.name)))
    try:
        for _ in range(churn.most // 2):
            await churn._add("")
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.stop()
        await churn.close()


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
        local = Path(folder)
        make_authority(local)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(local, name)
        async with (
            running(make_checkpoint(local), local, local / "state", poll_s=2.0) as world,
            churning(world, local, num_engines, 1) as churn,
        ):
            began_s = time.monotonic()
            await run(churn, num_events, per_s=per_s)
            churn.report(num_events, time.monotonic() - began_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0)
    given = parser.parse_args()
    asyncio.run(main(given.engines, given.events, given.rate))
