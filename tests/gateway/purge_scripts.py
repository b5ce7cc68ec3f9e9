"""Pool nodes and engines that answer purges."""

from __future__ import annotations

from functools import partial

from prfaas.wire.messages.gateway import Order, OrderDone
from tests.orders import word

from .conftest import World
from .scripted_pool import ScriptedPool

ENGINES = ("prefill", "decode", "spare")


def script(world: World, num_blocks: int = 3, problem: str = "") -> list[tuple[str, str]]:
    """Have pool nodes answer; what they and the engines are told, in order."""
    told: list[tuple[str, str]] = []

    def asked(pool: ScriptedPool, message: Order) -> None:
        told.append((pool.name, word(message)))
        if message.for_ns:
            pool.send(
                OrderDone(
                    job=message.job,
                    num_blocks=num_blocks,
                    host_bytes=300,
                    disk_bytes=20,
                    num_transfers=0,
                    problem=problem,
                )
            )

    for pool in (world.prfaas_pool, world.pd_pool):
        pool.on_purge = asked
    for name in ENGINES:
        engine = getattr(world, name)
        engine.on_forget = partial(forget, told, name)
    return told


def forget(told: list[tuple[str, str]], name: str) -> bool:
    told.append((name, "forget"))
    return True
