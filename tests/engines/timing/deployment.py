"""Timing engines in two clusters, with pool nodes, a link and a gateway: all of it real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from prfaas.config.deployment import Deployment
from prfaas.core.kv.blocks import HashScheme
from prfaas.engines.timing.host import InstanceHost
from prfaas.engines.timing.instance import TimedInstance
from prfaas.gateway.app import Gateway
from tests.lab.faults import FaultProxy
from tests.pool.sites import LOOPBACK, Site, until
from tests.ports import free_port

from .parts import MEMORY_BYTES, PartsOnStack
from .worlds import MODEL, PLAN, settings, started, write_plan

THRESHOLD = 200


LONG, SHORT = list(range(300)), list(range(100))


PD_ENGINES = ("pd-0", "pd-1")


@dataclass
class World:
    """Everything, and how it is reached."""

    url: str
    http: aiohttp.ClientSession
    gateway: Gateway
    sites: dict[str, Site]
    hosts: list[InstanceHost]
    wire: FaultProxy

    def instance(self, name: str) -> TimedInstance:
        return next(h.servers[name].instance for h in self.hosts if name in h.servers)

    @property
    def instances(self) -> list[TimedInstance]:
        return [server.instance for host in self.hosts for server in host.servers.values()]

    async def complete(
        self,
        prompt: list[int] | str,
        key: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        **body: Any,
    ) -> dict[str, Any]:
        headers = {**headers, "Authorization": f"Bearer {key}"} if key else headers
        asked = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, **body}
        async with self.http.post(
            f"{self.url}/v1/completions", json=asked, headers=headers
        ) as reply:
            answer: dict[str, Any] = await reply.json()
            assert reply.status == 200, answer
            return answer

    async def text(self, prompt: list[int]) -> str:
        return str((await self.complete(prompt))["choices"][0]["text"])

    async def record(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/control/requests") as reply:
            found: dict[str, Any] = (await reply.json())["requests"][0]
            return found

    def is_quiet(self) -> bool:
        """Nobody computes, waits or holds anything for a request."""
        engines = all(
            not (i.num_waiting or i.scheduler.num_running)
            and i.tier is not None
            and i.tier.rows.num_free == i.tier.rows.num_rows
            for i in self.instances
        )
        links = [link for site in self.sites.values() for link in site.node.links.values()]
        inbound = sum(site.node.inbound.known.num_open for site in self.sites.values())
        legs = sum(engine.num_in_flight for engine in self.gateway.engines.by_name.values())
        return engines and not inbound + legs + sum(link.num_open for link in links)

    def forget(self) -> None:
        """Empty the prefix caches of all instances."""
        for instance in self.instances:
            instance.cache.clear()


@asynccontextmanager
async def running(
    directory: Path,
    checkpoint: Path,
    identities: Path,
    time_scale: float = 0.001,
    kv_events: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    *,
    has_wire: bool = False,
    has_ranks: bool = False,
    plan_text: str = PLAN,
    pd_memory_bytes: int = MEMORY_BYTES,
    schemes: Mapping[str, HashScheme] = MappingProxyType({}),
    poll_s: float = 0.02,
    **tables: Any,
) -> AsyncIterator[World]:
    """A world; `kv_events` is where engines publish and repeat them, `has_wire` that pools are
    linked through its `wire`, `has_ranks` that the PD engines are data-parallel ranks behind one
    URL, `plan_text` what engines are like, and `schemes` which of them are SGLang's."""
    async with AsyncExitStack() as stack:
        parts = PartsOnStack(stack, directory, identities)
        tracing = tables.get("tracing", {}).get("endpoint")
        pd = await parts.pool_node(
            "pd-pool", {}, ["prfaas-pool"], memory_bytes=pd_memory_bytes, tracing=tracing
        )
        peers, wire = {"pd-pool": (LOOPBACK, pd.port)}, FaultProxy((LOOPBACK, 0))
        if has_wire:
            wire = await parts.wire()
            wire.target, peers["pd-pool"] = peers["pd-pool"], (LOOPBACK, wire.port)
        await parts.pool_node("prfaas-pool", peers, [], tracing=tracing)
        plan = write_plan(directory, plan_text)
        for pool, cluster, names in (
            ("prfaas-pool", "prfaas", ("prfaas-0",)),
            *(("pd-pool", None, names) for names in _hosts(schemes)),
        ):
            made = settings(
                plan,
                checkpoint,
                *names,
                cluster=cluster,
                pool=parts.socket(pool),
                time_scale=time_scale,
                hash_scheme=schemes.get(names[0], HashScheme.SHA256_CBOR),
                kv_events={name: kv_events[name] for name in names if name in kv_events},
            )
            if has_ranks:
                made = replace(made, engines=dict.fromkeys(names, (LOOPBACK, free_port())))
            await parts.engines(made)
        url, http, gateway = await parts.gateway(
            deployment_of(
                checkpoint,
                identities,
                directory / "state",
                kv_events=kv_events,
                has_ranks=has_ranks,
                **tables,
            ),
            poll_s,
        )
        world = World(url, http, gateway, parts.sites, parts.hosts, wire)
        await until(lambda: is_well(world))
        yield world
        await until(world.is_quiet)


def _hosts(schemes: Mapping[str, HashScheme]) -> list[tuple[str, ...]]:
    """PD engines by process: one has engines of one kind."""
    same = len({schemes.get(name) for name in PD_ENGINES}) == 1
    return [PD_ENGINES] if same else [(name,) for name in PD_ENGINES]


def is_well(world: World) -> bool:
    engines, pools = world.gateway.engines.by_name, world.gateway.pools
    announced = [pools.layout(engine.pool, engine.name) for engine in engines.values()]
    ready = all(engine.is_ready for engine in engines.values())
    return ready and all(announced) and pools.link_up("prfaas-pool", "pd-pool")


def deployment_of(
    checkpoint: Path,
    identities: Path,
    state: Path,
    roles: Mapping[str, str] = MappingProxyType({}),
    kv_events: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    *,
    has_ranks: bool = False,
    **tables: Any,
) -> Deployment:
    def cluster(role: str, pool: str, names: tuple[str, ...]) -> dict[str, Any]:
        engines: dict[str, Any] = {
            name: {"pool": pool, "role": roles.get(name, "both")} for name in names
        }
        for name in names:
            where = zip(("kv_events", "kv_events_replay"), kv_events.get(name, ()), strict=False)
            engines[name] |= dict(where)
            if has_ranks and role == "pd":
                # The address is told apart.
                engines[name] |= {"url": "http://ranks.invalid", "rank": names.index(name)}
        return {"role": role, "pools": {pool: {}}, "engines": engines}

    return Deployment.model_validate(
        {
            "model": {"name": MODEL, "path": str(checkpoint)},
            "gateway": {"listen": f"{LOOPBACK}:0"},
            "routing": {"offload_threshold": THRESHOLD},
            "security": {"identities": str(identities)},
            "state": str(state),
            **tables,
            "clusters": {
                "prfaas": cluster("prfaas", "prfaas-pool", ("prfaas-0",)),
                "pd": cluster("pd", "pd-pool", PD_ENGINES),
            },
        }
    )


async def alone(checkpoint: Path, directory: Path, prompt: list[int], plan_text: str = PLAN) -> str:
    """Return the answer of an engine without a pool."""
    host, urls = await started(settings(write_plan(directory, plan_text), checkpoint, "alone"))
    async with aiohttp.ClientSession() as http:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
        async with http.post(f"{urls['alone']}/v1/completions", json=body) as reply:
            text = str((await reply.json())["choices"][0]["text"])
    await host.close()
    return text
