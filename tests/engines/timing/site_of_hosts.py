"""Clusters of several hosts: on each a pool node and timing engines, with a real gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prfaas.config.deployment import Deployment
from prfaas.pool.shared.settings import SharedSettings
from prfaas.wire.identity import make_identity
from tests.lab.faults import FaultProxy
from tests.pool.sites import LOOPBACK, until

from .deployment import World
from .parts import MEMORY_BYTES, PartsOnStack
from .worlds import MODEL, PLAN, settings, write_plan

Roles = Mapping[str, str]
"""Roles of the engines of a host, by their names."""
AWAY = "prfaas"
"""The PrfaaS cluster, and what the plan calls it."""


@dataclass
class SiteWorld(World):
    """A world of hosts; all connections to a pool node but the gateway's pass its wire."""

    wires: Mapping[str, FaultProxy] = field(default_factory=dict)


@asynccontextmanager
async def site_of(
    directory: Path,
    checkpoint: Path,
    identities: Path,
    layout: Mapping[str, Roles],
    *,
    memory_bytes: int = MEMORY_BYTES,
    plan_text: str = PLAN,
    routing: Mapping[str, Any] | None = None,
    shared: SharedSettings | None = None,
    remote: Mapping[str, Sequence[str]] = MappingProxyType({}),
    **changes: Any,
) -> AsyncIterator[SiteWorld]:
    """A PD site, and possibly a PrfaaS site.

    Args:
        directory: For its files.
        checkpoint: Tokenizer.
        identities: Identities; those of the pool nodes are made.
        layout: Engines with their roles, by pool node.
        memory_bytes: Of each pool node.
        plan_text: Times of the engines.
        routing: Of the deployment; without a plan, unless one is named.
        shared: Tier that all pool nodes share.
        remote: Engines of the PrfaaS cluster, by pool node.
        changes: To the settings of the engines.
    """
    async with AsyncExitStack() as stack:
        parts = PartsOnStack(stack, directory, identities)
        wires = {pool: await parts.wire() for pool in (*layout, *remote)}
        plan = write_plan(directory, plan_text)
        deployment = _deployment(
            checkpoint,
            identities,
            directory / "state",
            {
                "pd": layout,
                AWAY: {pool: dict.fromkeys(names, "both") for pool, names in remote.items()},
            },
            routing or {},
        )
        for pool, names in {**layout, **remote}.items():
            make_identity(identities, pool)
            peers = {o: (LOOPBACK, wires[o].port) for o in deployment.destinations(pool)}
            sources = [source for source, target in deployment.links if target == pool]
            site = await parts.pool_node(
                pool, peers, sources, memory_bytes=memory_bytes, shared=shared
            )
            wires[pool].target = LOOPBACK, site.port
            cluster = AWAY if pool in remote else None
            made = settings(plan, checkpoint, *names, cluster=cluster, **changes)
            await parts.engines(replace(made, pool=parts.socket(pool)))
        url, http, gateway = await parts.gateway(deployment)
        wire = next(iter(wires.values()))
        world = SiteWorld(url, http, gateway, parts.sites, parts.hosts, wire, wires)
        await until(lambda: is_well(world))
        yield world
        await until(world.is_quiet)


def is_well(world: World) -> bool:
    """Return True if every engine is known, and every host reaches every other one."""
    engines, pools = world.gateway.engines.by_name, world.gateway.pools
    announced = [pools.layout(engine.pool, engine.name) for engine in engines.values()]
    ready = all(engine.is_ready for engine in engines.values())
    links = all(pools.link_up(*pair) for pair in world.gateway.driver.links())
    return ready and all(announced) and links


def only(world: World, *names: str) -> None:
    """Let no engines take requests but these."""
    driver, now_ns = world.gateway.driver, time.monotonic_ns()
    for name in world.gateway.engines.by_name:
        driver.set_drained(name, now_ns, drained=name not in names)


async def settled(world: World) -> None:
    """Wait until nothing runs, and the gateway knows what every pool holds."""

    def knows_all() -> bool:
        index = world.gateway.index
        held = {name: len(site.node.store) for name, site in world.sites.items()}
        return all(index.num_blocks(name) == number for name, number in held.items())

    while not (world.is_quiet() and knows_all()):  # noqa: ASYNC110 - an index signals nothing
        await asyncio.sleep(0.01)


def _deployment(
    checkpoint: Path,
    identities: Path,
    state: Path,
    clusters: Mapping[str, Mapping[str, Roles]],
    routing: Mapping[str, Any],
) -> Deployment:
    tables = {
        name: {
            "role": name,
            "pools": {pool: {} for pool in layout},
            "engines": {
                engine: {"pool": pool, "role": role}
                for pool, roles in layout.items()
                for engine, role in roles.items()
            },
        }
        for name, layout in clusters.items()
        if layout
    }
    return Deployment.model_validate(
        {
            "model": {"name": MODEL, "path": str(checkpoint)},
            "gateway": {"listen": f"{LOOPBACK}:0"},
            "routing": {"offload_threshold": 200, "policy": "local", **routing},
            "security": {"identities": str(identities)},
            "state": str(state),
            "clusters": tables,
        }
    )
