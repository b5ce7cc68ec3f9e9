"""A PD cluster of several hosts: on each a pool node and timing engines, with a real gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.config.deployment import Deployment
from prfaas.engines.timing.host import Host
from prfaas.gateway.app import Gateway
from prfaas.gateway.engines.endpoints import Endpoints
from prfaas.gateway.pools.pool_client import PoolTiming
from prfaas.lab.faults import FaultProxy
from prfaas.pool.node.settings import PoolSettings
from prfaas.wire.identity import identity_in, make_identity
from tests.pool.sites import LOOPBACK, Site, until

from .deployment import World
from .worlds import MODEL, PLAN, settings, started, write_plan

Roles = Mapping[str, str]
"""Roles of the engines of a host, by their names."""


@asynccontextmanager
async def site_of(
    directory: Path,
    checkpoint: Path,
    identities: Path,
    layout: Mapping[str, Roles],
    *,
    memory_bytes: int = 1 << 22,
    plan_text: str = PLAN,
    routing: Mapping[str, Any] | None = None,
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
        changes: To the settings of the engines.
    """
    async with AsyncExitStack() as stack:
        wires = {pool: FaultProxy((LOOPBACK, 0)) for pool in layout}
        for pool, wire in wires.items():
            make_identity(identities, pool)
            await wire.open()
            stack.push_async_callback(wire.close)
        sites, hosts, urls = dict[str, Site](), list[Host](), dict[str, str]()
        for pool, roles in layout.items():
            others = [other for other in layout if other != pool]
            site = Site(
                PoolSettings(
                    name=pool,
                    memory_bytes=memory_bytes,
                    listen=(LOOPBACK, 0),
                    socket_path=directory / f"{pool}.sock",
                    admin=(LOOPBACK, 0),
                    identity=identity_in(identities, pool),
                    peers={other: (LOOPBACK, wires[other].port) for other in others},
                    sources=frozenset(others),
                    gateways=frozenset({"gateway"}),
                )
            )
            await site.ready()
            stack.push_async_callback(site.kill)
            sites[pool], wires[pool].target = site, (LOOPBACK, site.port)
            made = settings(
                write_plan(directory, plan_text),
                checkpoint,
                *roles,
                pool=directory / f"{pool}.sock",
                **changes,
            )
            host, theirs = await started(made)
            stack.push_async_callback(host.close)
            hosts.append(host)
            urls |= theirs
        gateway = Gateway(
            _deployment(checkpoint, identities, directory / "state", layout, routing or {}),
            Endpoints(
                engines=urls, pools={pool: (LOOPBACK, site.port) for pool, site in sites.items()}
            ),
            poll_s=0.02,
            timing=PoolTiming(backoff_s=0.01, backoff_max_s=0.05),
        )
        url = await gateway.start()
        stack.push_async_callback(gateway.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        world = World(url, http, gateway, sites, hosts, next(iter(wires.values())))
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
