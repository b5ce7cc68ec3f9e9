"""Pool nodes of a site with a tier in a Mooncake Store, for several test modules."""

from __future__ import annotations

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.shared.mooncake.mooncake_tier import MooncakeTier
from prfaas.pool.shared.mooncake.settings import MooncakeSettings

from .conftest import World
from .shared_sites import start
from .sites import HASHES, Engine, Site, until

KEYS = [BlockKey(0, block_hash) for block_hash in HASHES[256:288]]


def mooncake_of(site: Site) -> MooncakeTier:
    assert isinstance(site.node.store_room.shared, MooncakeTier)
    return site.node.store_room.shared


async def connected(
    world: World, settings: MooncakeSettings, name: str = "pd-pool"
) -> tuple[Site, Engine]:
    """A node whose client is connected to the store, and its engine."""
    site = await start(world, settings, name)
    engine = await world.engine(name)
    await until(lambda: mooncake_of(site).client.is_ready)
    return site, engine


async def filled(world: World, settings: MooncakeSettings) -> tuple[Site, Engine]:
    """A node that has written KEYS to the store, and its engine."""
    site, engine = await connected(world, settings)
    assert await engine.store(KEYS)
    await until(lambda: len(mooncake_of(site)) == len(KEYS))
    return site, engine
