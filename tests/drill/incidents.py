"""A deployment of timing engines to which incidents happen, and what its log says of them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.deploy.topology import parts
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.wire.identity import make_authority, make_identity
from tests.deployments import laid_out, put_between, started
from tests.lab.faults import Fault, FaultProxy

from .clients import Clients
from .site import PROXY_BYTES, write_files

REQUESTS_MAX = 40
PER_S = 8.0
LOOK_S = 0.1
LIMIT_S = 60.0
Incident = dict[str, Any]


@dataclass
class Deployment:
    """A running deployment with one gateway, and its log of incidents."""

    supervisor: Supervisor
    url: str
    wire: FaultProxy
    clients: Clients
    identities: Path
    http: aiohttp.ClientSession
    broken_at: float = field(default_factory=time.time)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process and all it started."""
        self.broken_at = time.time()
        self.supervisor.part(name).signal(number)

    def cut(self) -> None:
        """Reset the connections between the pools, and let no new one through."""
        self.broken_at = time.time()
        self.wire.is_plugged = False
        self.wire.strike(Fault.RESET)

    def plug_in(self) -> None:
        """Let the pools connect again."""
        self.wire.is_plugged = True

    async def restart(self, name: str) -> None:
        """Start a process that was killed, and wait until it is well by itself."""
        await self.supervisor.restart(name)

    def give_strange_identity(self, name: str, folder: Path) -> Callable[[], None]:
        """Replace the identity of a part by one of another authority; returned: give it back."""
        kept = folder / "kept"
        shutil.copytree(self.identities, kept)
        strange = folder / "strange"
        make_authority(strange)
        make_identity(strange, name, ["127.0.0.1"])
        for file in strange.glob(f"{name}.*"):
            shutil.copy(file, self.identities / file.name)

        def give_back() -> None:
            for file in kept.glob(f"{name}.*"):
                shutil.copy(file, self.identities / file.name)

        return give_back

    async def burst(self, num_requests: int) -> list[int]:
        """Send so many requests at once; their statuses."""
        body = {"model": "timing-drill", "prompt": list(range(100, 150)), "max_tokens": 64}

        async def one() -> int:
            async with self.http.post(f"{self.url}/v1/completions", json=body) as reply:
                await reply.read()
                return reply.status

        return await asyncio.gather(*[one() for _ in range(num_requests)])

    async def get(self, path: str) -> Any:
        """A page of the gateway; None while it does not answer."""
        try:
            async with self.http.get(f"{self.url}/{path}") as reply:
                return await reply.json() if reply.status == 200 else None
        except aiohttp.ClientConnectionError:
            return None

    async def incidents(self) -> list[Incident]:
        """The log, the newest first."""
        found = await self.get("control/incidents")
        return found["incidents"] if found else []

    async def incident(
        self,
        name: str,
        subject: str,
        is_right: Callable[[Incident], bool] = lambda _: True,
    ) -> Incident:
        """Wait until the log has an incident that is as it has to be."""

        async def is_there() -> Incident | None:
            seen = [
                each
                for each in await self.incidents()
                if (each["name"], each["subject"]) == (name, subject)
                and (each["ended_at"] or time.time()) >= self.broken_at
            ]
            right = next(filter(is_right, seen), None)
            page: Incident | None = None
            if right is not None:
                page = await self.get(f"control/incidents/{right['id']}")
            return page if page and is_right(page) else None

        try:
            found: Incident = await until(is_there)
        except TimeoutError:
            known = await self.texts()
            raise AssertionError(f"no such incident {name} {subject}; there is:\n{known}") from None
        return found

    async def repaired(self, name: str, subject: str) -> Incident:
        """Wait until an incident has ended and the gateway sees every part."""
        found = await self.incident(name, subject, has_ended)
        await until(self.is_whole)
        return found

    async def texts(self) -> str:
        """The whole log as text, the oldest first."""
        ids = [each["id"] for each in reversed(await self.incidents())]
        return "\n".join([(await self.get(f"control/incidents/{i}"))["text"] for i in ids])

    async def is_whole(self) -> Any:
        """Return True if the gateway sees every part."""
        return await self.get("health?full=1")


async def until(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask until there is an answer, and return it."""
    async with asyncio.timeout(LIMIT_S):
        while not (found := await ask()):  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(LOOK_S)
        return found


def is_open(found: Incident) -> bool:
    return found["ended_at"] is None


def has_ended(found: Incident) -> bool:
    return found["ended_at"] is not None


def touches(found: Incident) -> bool:
    return found["num_requests"] > 0


@asynccontextmanager
async def running(local: Path) -> AsyncIterator[Deployment]:
    """Start a deployment under load, and stop it."""
    file = write_files(local, ("prfaas-0",))
    text = file.read_text().replace("[gateway]", f"[gateway]\nrequests_max = {REQUESTS_MAX}")
    file.write_text(text)
    topology = await laid_out(file)
    wire = FaultProxy(topology.pools["pd-pool"], buffer_bytes=PROXY_BYTES)
    await wire.open()
    stages = parts(topology)
    put_between(stages, "prfaas-pool", "pd-pool", wire.port)
    model = Path(topology.deployment.model.path)
    try:
        async with started(stages) as supervisor, aiohttp.ClientSession() as http:
            clients = Clients([topology.gateway_url], model)
            found = Deployment(
                supervisor,
                topology.gateway_url,
                wire,
                clients,
                topology.deployment.security.identities,
                http,
            )
            await until(found.is_whole)
            load = asyncio.create_task(clients.run(PER_S))
            try:
                yield found
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
    finally:
        await wire.close()
