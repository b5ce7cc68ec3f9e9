"""Pool nodes of a site with a tier in a bucket, for several test modules."""

from __future__ import annotations

import asyncio
from typing import Any

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.shared.s3_tier import S3Tier
from prfaas.pool.shared.settings import SharedSettings
from prfaas.wire.identity import make_identity
from prfaas.wire.messages.gateway import Evicted, Stored

from .conftest import World
from .sites import Engine, Peer, Site, content, until

OTHER = "pd-other"


def tier_of(site: Site) -> S3Tier:
    assert isinstance(site.node.store_room.shared, S3Tier)
    return site.node.store_room.shared


async def start(
    world: World, settings: SharedSettings, name: str = "pd-pool", **further: Any
) -> Site:
    make_identity(world.identities, name)
    return await world.start(name, shared=settings, **further)


async def stop(world: World, site: Site, engine: Engine) -> None:
    """End a pool node and its engine, in an orderly way."""
    world.engines.remove(engine)
    await asyncio.to_thread(engine.close)
    await site.kill()


async def all_written(site: Site, num_blocks: int) -> None:
    await until(lambda: len(tier_of(site)) == num_blocks)


def num_keys(watch: Peer, kind: type[Stored | Evicted]) -> int:
    """Keys in all events of a kind."""
    return sum(len(m.keys) for m in watch.messages if isinstance(m, kind))


async def loads_right(engine: Engine, keys: list[BlockKey]) -> list[bool]:
    """Load blocks; whether each came, and came as it was."""
    loaded = await engine.load(keys)
    for row, (key, is_loaded) in enumerate(zip(keys, loaded, strict=True)):
        assert not is_loaded or engine.row(row, key.group) == content(key), "a wrong block"
    return loaded
