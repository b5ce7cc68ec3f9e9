"""Shared by tests of purges: blocks by where they came from, and a purge with its answer."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.messages.engine import Store
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import OrderDone
from tests.orders import purge, purge_end

from .conftest import World
from .sites import LAYOUT, PROMPT, Engine, Peer, Site, until

SOURCE = "prfaas-pool"
OWN = [BlockKey(0, bytes([n]) * 32) for n in range(100, 104)]
"""Computed by a local engine from nothing that came from elsewhere."""
AFTER = [BlockKey(0, bytes([n]) * 32) for n in range(110, 114)]
"""Computed by it from blocks that came."""
RECEIVED = {"direction": "received"}


async def store(engine: Engine, keys: list[BlockKey], *sources: str) -> bool:
    message = Store(
        job=engine.job(), keys=wire_keys(keys), rows=engine.fill(keys), sources=list(sources)
    )
    return (await engine.finish(message)).ok


async def ship(prefill: Engine, pd: Site) -> bytes:
    before = pd.metric("transfers_total", **RECEIVED, state="committed")
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") > before)
    return transfer


async def ask(gateway: Peer, job: int = 1, **fields: Any) -> OrderDone:
    """Have a pool node purge; its answer."""
    asked: dict[str, Any] = {"source": SOURCE} | fields
    gateway.channel.send(purge(job, **asked))

    def answers() -> list[OrderDone]:
        return [m for m in gateway.messages if isinstance(m, OrderDone) and m.job == job]

    await until(answers)
    [answer] = answers()
    return answer


async def end(gateway: Peer) -> bool:
    """End a purge; return True if nothing of its source was taken until then."""
    gateway.channel.send(purge_end(job=77, source=SOURCE))

    def answers() -> list[OrderDone]:
        return [m for m in gateway.messages if isinstance(m, OrderDone) and m.job == 77]

    await until(answers)
    [answer] = answers()
    gateway.messages.clear()
    return answer.was_in_force


def origins(site: Site) -> dict[BlockKey, Origin]:
    held = {key: block.origin for (_, key), block in site.node.store.room.blocks.items()}
    if site.node.disk is not None:
        for _, key in site.node.disk.names():
            held.setdefault(key, site.node.disk.origin((LAYOUT.layout_id, key)))
    return held


def undated(site: Site) -> dict[BlockKey, Origin]:
    """Origins without the times at which blocks were computed."""
    return {key: replace(origin, born_s=0) for key, origin in origins(site).items()}


async def on_disk(site: Site) -> None:
    """Have all that is in memory written to disk as well."""
    assert site.node.disk is not None
    disk = site.node.disk
    await until(lambda: disk.is_ready)
    for name, block in site.node.store.room.blocks.items():
        if name not in disk:
            block.pins += 1
            assert disk.offer(name, block, partial(unpin, block))
    await until(lambda: all(name in disk for name in site.node.store.room.blocks))


def unpin(block: StoredBlock) -> None:
    block.pins -= 1


def forget_memory(site: Site) -> None:
    for name in list(site.node.store.room.blocks):
        site.node.store.discard(*name)


def decode_name(site: Site) -> str:
    [engine] = site.node.engine_room.engines
    return engine


async def restarted(world: World, pd: Site, folder: Path) -> Site:
    await pd.kill()
    again = await world.start_pd(disk=folder, disk_bytes=1 << 20)
    assert again.node.disk is not None
    disk = again.node.disk
    await until(lambda: disk.is_ready)
    return again


def fails(*_: object) -> None:
    raise OSError("no space left")
