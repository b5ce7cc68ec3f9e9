"""The two sites of most tests, and what has to hold when a test is over."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prfaas.core.codec.codecs import LinkCodec
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.wire.identity import identity_in
from tests.lab.faults import FaultProxy

from .coded_pair import MEMORY as PAIR_MEMORY
from .coded_pair import MODEL, Pair, Pairs
from .sites import LOOPBACK, MEMORY, Engine, Relay, Site, until
from .taps import Tap

SETTLE_S = 30.0


@dataclass
class World:
    """A PrfaaS site that pushes to a PD site through a relay, and an engine at each."""

    identities: Path
    sockets: Path
    relay: Relay
    sites: list[Site] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    kernels: Kernels = KERNELS

    async def start(self, name: str, **settings: object) -> Site:
        defaults = {
            "name": name,
            "memory_bytes": MEMORY,
            "listen": (LOOPBACK, 0),
            "socket_path": self.sockets / f"{name}.sock",
            "admin": (LOOPBACK, 0),
            "identity": identity_in(self.identities, name),
            "peers": {"pd-pool": (LOOPBACK, self.relay.port)} if name == "prfaas-pool" else {},
            "sources": frozenset({"prfaas-pool"} if name == "pd-pool" else ()),
            "gateways": frozenset({"gateway"}),
        }
        site = Site(PoolProcessSettings(**(defaults | settings)), self.kernels)  # type: ignore[arg-type]
        await site.ready()
        self.sites.append(site)
        return site

    async def start_pd(self, **settings: object) -> Site:
        site = await self.start("pd-pool", **settings)
        self.relay.target = site.port
        return site

    async def engine(self, pool: str) -> Engine:
        engine = Engine(f"engine-of-{pool}", self.sockets / f"{pool}.sock", self.identities)
        self.engines.append(engine)
        await engine.connected()
        return engine

    async def linked(self, prfaas: Site, pd: Site) -> None:
        link = prfaas.node.links["pd-pool"]
        await until(lambda: link.is_up and pd.node.inbound.channels.is_connected("prfaas-pool"))

    async def two_sites(self, **pd: object) -> tuple[Site, Site, Engine, Engine]:
        """Both sites, linked, with an engine each."""
        receiver = await self.start_pd(**pd)
        sender = await self.start("prfaas-pool")
        await self.linked(sender, receiver)
        return sender, receiver, await self.engine("prfaas-pool"), await self.engine("pd-pool")


@pytest.fixture
async def world(identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    relay = Relay()
    await relay.open()
    made = World(identities, tmp_path, relay)
    yield made
    for engine in made.engines:
        await asyncio.to_thread(engine.close)
    running = [site for site in made.sites if site.is_running]
    async with asyncio.timeout(SETTLE_S):
        await until(lambda: all(is_settled(site) for site in running))
    for site in running:
        site.check()
    for site in running:
        await site.kill()
    await relay.close()


def is_settled(site: Site) -> bool:
    """Return True if no work is under way."""
    try:
        site.check()
    except AssertionError:
        return False
    return True


@pytest.fixture
async def pair(world: World, identities: Path) -> AsyncIterator[Pairs]:
    proxies = []

    async def made(sender: LinkCodec, receiver: LinkCodec) -> Pair:
        pd = await world.start("pd-pool", memory_bytes=PAIR_MEMORY, link_codec=receiver)
        proxy = FaultProxy(("127.0.0.1", pd.port))
        await proxy.open()
        proxies.append(proxy)
        prfaas = await world.start(
            "prfaas-pool",
            memory_bytes=PAIR_MEMORY,
            link_codec=sender,
            link_connections={"pd-pool": 2},
            peers={"pd-pool": ("127.0.0.1", proxy.port)},
        )
        for site in (pd, prfaas):
            site.node.link_room.layouts.learn(MODEL)
        found = Pair(proxy, prfaas, pd, identities)
        link = prfaas.node.links["pd-pool"]
        await until(lambda: link.telemetry.num_connections == 2)
        if LinkCodec.RAW not in (sender, receiver):
            await until(lambda: found.is_agreed and KERNELS.window is not None)
        return found

    yield made
    for proxy in proxies:
        await proxy.close()


@pytest.fixture
async def tap() -> AsyncIterator[Tap]:
    made = Tap()
    await made.open()
    yield made
    await made.close()
