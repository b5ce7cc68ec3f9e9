"""A request that is offloaded, and what its end leaves behind."""

from __future__ import annotations

from .conftest import World, until
from .prompts import LONG

BODY = {"prompt": LONG, "max_tokens": 3}


async def both_pools_heard_the_abort(world: World) -> None:
    await until(lambda: bool(world.prfaas_pool.aborts and world.pd_pool.aborts))
    transfer = world.prefill.calls[0].body["kv_transfer_params"]["prfaas"]["transfer"]
    for pool in (world.prfaas_pool, world.pd_pool):
        assert [abort.transfer_id.hex() for abort in pool.aborts] == [transfer]
