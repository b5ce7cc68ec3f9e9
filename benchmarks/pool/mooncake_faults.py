"""Errors, wrong answers and delays of clients while a part of a Mooncake Store fails under load."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.pool.mooncake import settings_of
from prfaas.pool.shared.mooncake.mooncake_tier import MooncakeTier
from prfaas.wire.identity import make_authority, make_identity
from tests.engines.timing.site_of_hosts import site_of
from tests.engines.timing.tier_faults import HEAD, Outcome, under_load
from tests.gateway.conftest import make_checkpoint
from tests.mooncake import store as stores
from tests.pool.sites import until


async def faults(seconds: float) -> None:
    """Print a table of all faults."""
    print(HEAD)
    for part in ("provider", "master", "client"):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            out = await _under(part, number, seconds)
            print(out.row(f"{part} {number.name}", seconds), flush=True)
            print("\n".join(out.errors[:3]), end="")


async def _under(part: str, number: signal.Signals, seconds: float) -> Outcome:
    with tempfile.TemporaryDirectory() as text, stores.running_store() as store:
        place = Path(text)
        identities = place / "identities"
        make_authority(identities)
        make_identity(identities, "gateway")
        checkpoint = make_checkpoint(place / "checkpoint")
        layout = {"pool-a": {"e0": "both"}}
        shared = settings_of(store.port, place)
        async with site_of(place, checkpoint, identities, layout, shared=shared) as world:
            tier = world.sites["pool-a"].node.store_room.shared
            assert isinstance(tier, MooncakeTier)
            await until(lambda: tier.client.is_ready)
            inject: dict[str, Callable[[], None]] = {
                "provider": lambda: store.providers[0].signal(number),
                "master": lambda: store.master.signal(number),
                "client": lambda: os.kill(tier.client.process_id or 0, number),
            }
            return await under_load(world, inject[part], seconds)
