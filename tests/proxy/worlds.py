"""A proxy with two sites over TLS, in front of a timing engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.audit.settings import AuditSettings
from prfaas.proxy.proxy import Proxy, ProxySettings
from prfaas.wire.identity import identity_in, make_authority, make_identity
from tests.engines.timing.worlds import MODEL, started, write_plan
from tests.engines.timing.worlds import settings as engine_settings
from tests.ports import free_port

PROMPT = list(range(200))
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": PROMPT,
    "max_tokens": 1,
    "temperature": 0,
    "stream": False,
    "cache_salt": "salt of a",
    "kv_transfer_params": {"prfaas": {}},
}
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class World:
    """A proxy with two sites, and its engine."""

    local: Path
    proxy: Proxy
    sessions: dict[str, aiohttp.ClientSession]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.proxy.ports['engine']}"

    def metric(self, name: str, **labels: str) -> float:
        registry = self.proxy.metrics.registry
        return registry.get_sample_value(f"prfaas_proxy_{name}", labels) or 0.0

    async def post(self, site: str, **changes: Any) -> int:
        body = BODY | {"cache_salt": f"salt of {site}"} | changes
        async with self.sessions[site].post(f"{self.url}/v1/completions", json=body) as reply:
            await reply.read()
            return reply.status

    async def get(self, site: str, path: str) -> tuple[int, str]:
        async with self.sessions[site].get(self.url + path) as reply:
            return reply.status, await reply.text()


def write_contracts(
    local: Path,
    port: int,
    behind: str,
    *sites: str,
    more: str = "",
    other: int | None = None,
) -> None:
    text = ""
    for engine, at in (("engine", port), ("other", other)):
        if at is not None:
            text += f'[engines.{engine}]\nlisten = "127.0.0.1:{at}"\nurl = "{behind}"\nslots = 1\n'
    for site in sites:
        text += (
            f'[contracts.{site}]\nauthority = "{local}/{site}/ca.pem"\nshare = 1\n'
            f'gateways = ["gateway-{site}"]\npools = {{ {site}-pool = "127.0.0.1:1" }}\n{more}\n'
        )
    (local / "contracts.toml").write_text(text)


@asynccontextmanager
async def running(
    local: Path, checkpoint: Path, more: str = "", behind: str = "", other: int | None = None
) -> AsyncIterator[World]:
    for folder, name in (("prfaas", "proxy"), ("a", "gateway-a"), ("b", "gateway-b")):
        make_authority(local / folder)
        make_identity(local / folder, name, ["127.0.0.1"])
    make_identity(local / "b", "gateway-x")
    (local / "c").mkdir()
    for name in ("ca.pem", "ca.key"):
        (local / "c" / name).write_bytes((local / "b" / name).read_bytes())
    make_identity(local / "c", "gateway-a")
    own = (local / "prfaas" / "ca.pem").read_text()
    plan = write_plan(local)
    made = engine_settings(plan, checkpoint, "engine", cluster="prfaas", time_scale=0.3)
    host, urls = await started(made)
    port = free_port()
    write_contracts(local, port, behind or urls["engine"], "a", "b", more=more, other=other)
    audit = AuditSettings(local / "audit", local / "audit")
    proxy = Proxy(
        ProxySettings(
            "proxy",
            local / "contracts.toml",
            identity_in(local / "prfaas", "proxy"),
            ("127.0.0.1", 0),
            audit,
            look_s=0.05,
        )
    )
    ready = asyncio.Event()
    task = asyncio.create_task(proxy.run(ready.set))
    await ready.wait()
    sessions = {}
    for label, folder, name in (
        ("a", "a", "gateway-a"),
        ("b", "b", "gateway-b"),
        ("stranger", "b", "gateway-x"),
        ("forger", "c", "gateway-a"),
    ):
        ca = local / folder / "trusted.pem"
        ca.write_text((local / folder / "ca.pem").read_text() + own)
        identity = identity_in(local / folder, name)
        context = type(identity)(ca, identity.certificate, identity.key).client_context()
        sessions[label] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))
    world = World(local, proxy, sessions)
    try:
        yield world
        proxy._turns.validate()
    finally:
        for session in sessions.values():
            await session.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await host.close()


async def connect(world: World, site: str, engine: str = "engine") -> Wire:
    identity = identity_in(world.local / site, f"gateway-{site}")
    trusted = world.local / site / "trusted.pem"
    context = type(identity)(trusted, identity.certificate, identity.key).client_context()
    return await asyncio.open_connection("127.0.0.1", world.proxy.ports[engine], ssl=context)
