"""A PD cluster of several hosts: on each a pool node and timing engines, with a real gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

from prfaas.config.deployment import Deployment
from prfaas.pool.shared.settings import S3Settings
from prfaas.wire.identity import make_identity
from tests.pool.sites import LOOPBACK, until

from .deployment import World
from .parts import MEMORY_BYTES, PartsOnStack
from .worlds import MODEL, PLAN, settings, write_plan

Roles = Mapping[str, str]
"""Roles of the engines of a host, by their names."""


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
    shared: S3Settings | None = None,
    **changes: Any,
) -> AsyncIterator[World]:
    """A site.

    Args:
        directory: For its files.
        checkpoint: Tokenizer.
        identities: Identities; those of the pool nodes are made.
        layout: Engines with their roles, by pool node.
        memory_bytes: Of each pool node.
        plan_text: Times of the engines.
        routing: Of the deployment; without a plan, unless one is named.
        shared: Tier that all pool nodes share.
        changes: To the settings of the engines.
    """
    async with AsyncExitStack() as stack:
        parts = PartsOnStack(stack, directory, identities)
        wires = {pool: await parts.wire() for pool in layout}
        plan = write_plan(directory, plan_text)
        for pool, roles in layout.items():
            make_identity(identities, pool)
            others = [other for other in layout if other != pool]
            peers = {other: (LOOPBACK, wires[other].port) for other in others}
            site = await parts.pool_node(
                pool, peers, others, memory_bytes=memory_bytes, shared=shared
            )
            wires[pool].target = LOOPBACK, site.port
            await parts.engines(
                settings(plan, checkpoint, *roles, pool=parts.socket(pool), **changes)
            )
        url, http, gateway = await parts.gateway(
            _deployment(checkpoint, identities, directory / "state", layout, routing or {})
        )
        world = World(url, http, gateway, parts.sites, parts.hosts, next(iter(wires.values())))
        await until(lambda: is_well(world))
        yield world
        await until(world.is_quiet)


def is_well(world: World) -> bool:
    """Return True if every engine is known, and every host reaches every other one."""
    engines, pools = world.gateway.engines.by_name, world.gateway.pools
    announced = [pools.layout(engine.pool, engine.name) for engine in engines.values()]
    ready = all(engine.is_ready for engine in engines.values())
    links = all(pools.link_up(*pair) for pair in permutations(world.sites, 2))
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
    layout: Mapping[str, Roles],
    routing: Mapping[str, Any],
) -> Deployment:
    engines = {
        name: {"pool": pool, "role": role}
        for pool, roles in layout.items()
        for name, role in roles.items()
    }
    cluster = {"role": "pd", "pools": {pool: {} for pool in layout}, "engines": engines}
    return Deployment.model_validate(
        {
            "model": {"name": MODEL, "path": str(checkpoint)},
            "gateway": {"listen": f"{LOOPBACK}:0"},
            "routing": {"offload_threshold": 200, "policy": "local", **routing},
            "security": {"identities": str(identities)},
            "state": str(state),
            "clusters": {"pd": cluster},
        }
    )
