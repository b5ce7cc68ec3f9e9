"""Routing tables with a plan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from .conftest import World, running, until


@asynccontextmanager
async def routing(
    checkpoint: Path, identities: Path, directory: Path, **table: Any
) -> AsyncIterator[World]:
    async with running(checkpoint, identities, directory / "state", routing=table) as world:
        pools = world.gateway.pools
        await until(lambda: pools.link_up("prfaas-pool", "pd-pool"))
        yield world
