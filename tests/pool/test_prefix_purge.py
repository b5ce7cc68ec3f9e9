"""Purges of the blocks of one prompt, by their names, in every tier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prfaas.audit.settings import AuditSettings
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.wire.messages.engine import HIT, MISS
from prfaas.wire.messages.gateway import Evicted, OrderDone
from tests.orders import purge, purge_end
from tests.s3.fixtures import Bucket

from .conftest import World
from .purges import forget_memory, on_disk, restarted
from .shared_sites import OTHER, all_written, num_keys, start, stop
from .sites import Engine, Peer, subscribe, until

OWNER, OTHERS = tenant_tag("owner"), tenant_tag("others")


def keys(first: int, last: int) -> list[BlockKey]:
    return [BlockKey(0, number.to_bytes(32, "big")) for number in range(first, last)]


PROMPT, REST = keys(300, 308), keys(310, 314)
HASHES = b"".join(key.block_hash for key in PROMPT)


async def ask(
    gateway: Peer, job: int = 1, *, is_dry: bool = False, tenant: str = OWNER
) -> OrderDone:
    gateway.channel.send(purge(job=job, hashes=HASHES, tenant=tenant, is_dry=is_dry))

    def answers() -> list[OrderDone]:
        return [m for m in gateway.messages if isinstance(m, OrderDone) and m.job == job]

    await until(answers)
    return answers()[0]


async def end(gateway: Peer) -> bool:
    gateway.channel.send(purge_end(job=99, hashes=HASHES, tenant=OWNER))

    def answers() -> list[OrderDone]:
        return [m for m in gateway.messages if isinstance(m, OrderDone) and m.job == 99]

    await until(answers)
    return answers()[0].was_in_force


async def stored(engine: Engine, tenant: str = OWNER) -> None:
    assert await engine.store(PROMPT, tenant=tenant)
    assert await engine.store(REST, tenant=OWNER)


async def test_the_blocks_of_the_prompt_go_from_memory_and_disk_for_good(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    pd = await world.start_pd(disk=folder, disk_bytes=1 << 20)
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    await stored(engine)
    await on_disk(pd)
    counted = await ask(gateway, is_dry=True)
    assert (counted.num_blocks, counted.host_bytes, counted.disk_bytes) == (8, 8 * 128, 8 * 128)
    assert pd.held() == {*PROMPT, *REST}

    purged = await ask(gateway, job=2)
    assert (purged.num_blocks, purged.problem) == (8, "")
    assert pd.held() == set(REST)
    await until(lambda: num_keys(gateway, Evicted) == len(PROMPT))
    assert await engine.look_up([*PROMPT, *REST]) == [MISS] * 8 + [HIT] * 4
    again = await restarted(world, pd, folder)
    assert again.held() == set(REST)


async def test_the_names_are_barred_until_the_end_and_only_they(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    assert (await ask(gateway)).num_blocks == 0
    assert not await engine.store(PROMPT, tenant=OWNER)
    assert await engine.store(REST, tenant=OWNER)
    assert await end(gateway)
    assert await engine.store(PROMPT, tenant=OWNER)
    assert pd.held() == {*PROMPT, *REST}
    gateway.channel.close("done")


async def test_purges_of_two_prompts_by_one_gateway_bar_both(world: World) -> None:
    """Two replicas of a gateway have one name; the end of one purge does not end the other."""
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    await ask(gateway)
    other = b"".join(key.block_hash for key in REST)
    gateway.channel.send(purge(job=2, hashes=other, tenant=OWNER))
    await until(lambda: len(gateway.of(OrderDone)) == 2)
    assert not await engine.store(PROMPT, tenant=OWNER)
    assert not await engine.store(REST, tenant=OWNER)
    gateway.channel.send(purge_end(job=3, hashes=other, tenant=OWNER))
    await until(lambda: len(gateway.of(OrderDone)) == 3)
    assert not await engine.store(PROMPT, tenant=OWNER)
    assert await engine.store(REST, tenant=OWNER)
    assert await end(gateway)
    gateway.channel.close("done")


async def test_blocks_of_another_tenant_stay(world: World) -> None:
    """Their names cannot be known without the salt: who asks for them is wrong, or a cheat."""
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    await stored(engine, OTHERS)
    assert (await ask(gateway)).num_blocks == 0
    assert pd.held() == {*PROMPT, *REST}
    assert await end(gateway)
    gateway.channel.close("done")


async def test_the_receipt_names_the_end_of_the_prompt(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    pd = await world.start_pd(audit=AuditSettings(folder, tmp_path / "keys"))
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    await stored(engine)
    assert (await ask(gateway)).problem == ""
    lines = [line for file in folder.rglob("*") if file.is_file() for line in _lines(file)]
    [receipt] = [line for line in lines if line.get("kind") == "purge"]
    assert (receipt["prefix"], receipt["tenant"]) == (PROMPT[-1].block_hash.hex(), OWNER)
    assert (receipt["outcome"], receipt["blocks"], receipt["bytes"]) == ("complete", 8, 8 * 128)
    assert await end(gateway)
    gateway.channel.close("done")


def _lines(file: Path) -> list[dict[str, object]]:
    found = []
    for line in file.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


@pytest.mark.timeout(300)
async def test_the_blocks_of_the_prompt_leave_the_bucket(world: World, bucket: Bucket) -> None:
    pd = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    await stored(engine)
    await all_written(pd, len(PROMPT) + len(REST))
    forget_memory(pd)
    assert (await ask(gateway, is_dry=True)).shared_bytes == 8 * 128
    assert (await ask(gateway, job=2)).problem == ""
    assert not {*PROMPT} & pd.held()
    await end(gateway)
    gateway.channel.close("done")
    other = await start(world, bucket.settings, OTHER)
    reader = await world.engine(OTHER)
    assert await reader.look_up(PROMPT) == [MISS] * len(PROMPT)
    await stop(world, other, reader)
