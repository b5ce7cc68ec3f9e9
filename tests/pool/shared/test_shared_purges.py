"""Purges of a bucket that keeps what it deletes: nothing of before a purge is a hit again.

python -m pytest tests/pool/shared/test_shared_purges.py      figures in docs/results/purge.md
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from prfaas.core.cache.keep_rules import Scope
from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.shared.purge_marks import MARKS_MAX, PurgeMarks
from prfaas.wire.messages.engine import HIT, MISS, Store
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import OrderDone
from tests.orders import purge, purge_end
from tests.pool.conftest import World
from tests.pool.purges import ask
from tests.pool.shared_sites import OTHER, all_written, loads_right, start, stop, tier_of
from tests.pool.sites import HASHES, LAYOUT, Engine, Peer, Site, subscribe, until
from tests.s3.faulty import Fault
from tests.s3.fixtures import Bucket
from tests.s3.memory_bucket import MemoryBucket

pytestmark = pytest.mark.timeout(300)
KEYS = [BlockKey(0, block_hash) for block_hash in HASHES[300:332]]
BAD, GOOD = KEYS[:16], KEYS[16:]
TENANT = "ab" * 16
SCOPES = {"source": {"source": "bad-pool"}, "tenant": {"source": "", "tenant": TENANT}}


async def stored(engine: Engine, keys: list[BlockKey], *sources: str, tenant: str = TENANT) -> None:
    """Blocks that an engine computes, from some of these sources."""
    message = Store(
        job=engine.job(),
        keys=wire_keys(keys),
        rows=engine.fill(keys),
        sources=list(sources),
        tenant=tenant,
    )
    assert (await engine.finish(message)).ok


async def written(world: World, bucket: Bucket) -> tuple[Site, Engine, Peer]:
    """A node with the blocks of a bad source in the bucket, its engine, and a gateway."""
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    await stored(engine, BAD, "bad-pool")
    await all_written(site, len(BAD))
    return site, engine, await subscribe(site, world.identities)


async def purged(gateway: Peer, scope: str, job: int = 1) -> OrderDone:
    answer = await ask(gateway, job, **SCOPES[scope])
    gateway.channel.send(purge_end(job=job, **SCOPES[scope]))
    return answer


def _is_listed(site: Site) -> bool:
    return tier_of(site).is_listed


async def lists_again(site: Site) -> None:
    """The next two lists of the bucket, from their beginning, are done."""
    before = site.metric("pool_shared_requests_total", operation="list", outcome="ok")
    await until(
        lambda: (
            site.metric("pool_shared_requests_total", operation="list", outcome="ok") >= before + 2
        )
    )


@pytest.mark.parametrize("scope", SCOPES)
async def test_what_comes_back_after_a_purge_is_no_hit(
    world: World, bucket: Bucket, scope: str
) -> None:
    """Versioning, and somebody who restores all that was deleted, keys included."""
    await bucket.versions.keep()
    site, engine, gateway = await written(world, bucket)
    answer = await purged(gateway, scope)
    assert await bucket.versions.restore()
    assert await bucket.objects()
    await lists_again(site)

    assert (answer.num_blocks, answer.problem) == (16, "")
    assert await engine.look_up(BAD) == [MISS] * 16
    await stored(engine, BAD)
    await all_written(site, len(BAD))
    assert await engine.look_up(BAD) == [HIT] * 16, "computed anew"
    gateway.channel.close("done")


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_node_that_starts_later_refuses_what_came_back(
    world: World, bucket: Bucket, scope: str
) -> None:
    await bucket.versions.keep()
    site, engine, gateway = await written(world, bucket)
    assert (await purged(gateway, scope)).problem == ""
    gateway.channel.close("done")
    await stop(world, site, engine)
    assert await bucket.versions.restore()

    for name in ("pd-pool", OTHER):
        late = await start(world, bucket.settings, name)
        engine = await world.engine(name)
        await until(partial(_is_listed, late))
        assert await engine.look_up(BAD) == [MISS] * 16
        unreadable = late.metric("pool_shared_unreadable_total", reason="purged")
        assert unreadable or scope == "tenant"  # Its keys are refused before.


async def test_a_mark_that_the_bucket_lost_is_written_again(world: World, bucket: Bucket) -> None:
    """A bucket that is restored as it was before the purge, while a node runs."""
    await bucket.versions.keep()
    site, engine, gateway = await written(world, bucket)
    await ask(gateway, source="bad-pool")
    marks = [path for path in await bucket.everything() if path.startswith("purges/")]
    await bucket.direct.delete(marks, 60)
    await bucket.versions.restore(LAYOUT.layout_id.hex())
    await lists_again(site)
    gateway.channel.close("done")
    await stop(world, site, engine)

    late = await start(world, bucket.settings, OTHER)
    engine = await world.engine(OTHER)
    await until(lambda: tier_of(late).is_listed)
    assert len(marks) == 1
    assert await engine.look_up(BAD) == [MISS] * 16


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_server_that_does_not_delete_is_in_the_receipt(
    world: World, bucket: Bucket, scope: str
) -> None:
    site, engine, gateway = await written(world, bucket)
    bucket.s3.fault, bucket.s3.methods = Fault.LIES, frozenset({"POST", "DELETE"})
    answer = await purged(gateway, scope)
    await lists_again(site)

    assert "still lists" in answer.problem
    assert await engine.look_up(BAD) == [MISS] * 16
    bucket.s3.fault = None
    assert (await purged(gateway, scope, 3)).problem == ""
    assert not await bucket.objects()
    gateway.channel.close("done")


async def test_blocks_of_one_prompt_do_not_come_back(world: World, bucket: Bucket) -> None:
    await bucket.versions.keep()
    site, engine, gateway = await written(world, bucket)
    hashes = b"".join(key.block_hash for key in BAD)
    gateway.channel.send(purge(job=1, tenant=TENANT, hashes=hashes))
    await until(lambda: len(gateway.of(OrderDone)) == 1)
    gateway.channel.send(purge_end(job=2, tenant=TENANT, hashes=hashes))
    assert [each.problem for each in gateway.of(OrderDone)] == [""]
    assert await bucket.versions.restore()
    await lists_again(site)

    assert await engine.look_up(BAD) == [MISS] * 16
    gateway.channel.close("done")


async def test_other_sources_and_tenants_stay(world: World, bucket: Bucket) -> None:
    """Neither their packs of before the purge are refused, nor their keys."""
    site, engine, gateway = await written(world, bucket)
    await stored(engine, GOOD, tenant="cd" * 16)
    await all_written(site, len(KEYS))
    await purged(gateway, "source")
    await purged(gateway, "tenant", 2)
    await lists_again(site)
    second = await start(world, bucket.settings, OTHER)
    other = await world.engine(OTHER)
    await until(lambda: tier_of(second).is_listed)
    assert await other.look_up(KEYS) == [MISS] * 16 + [HIT] * 16
    assert await loads_right(other, GOOD) == [True] * 16
    gateway.channel.close("done")


async def test_marks_of_one_scope_are_one_and_their_number_is_bounded(bucket: Bucket) -> None:
    memory = MemoryBucket()
    marks = PurgeMarks(memory, load_keys(Path(bucket.settings.keys)), 60)
    for at_ms in (5, 3, 7):
        await marks.add(Scope("bad-pool"), at_ms)
    assert [path[-12:] for path in memory.objects] == [f"{7:012x}"]
    for number in range(MARKS_MAX + 5):
        await marks.add(Scope(f"pool-{number}"), 10 + number)
    assert len(marks._marks) == MARKS_MAX


async def test_a_mark_of_another_site_refuses_nothing(bucket: Bucket, tmp_path: Path) -> None:
    """Its key is not this site's; a mark under another name is not either."""
    memory = MemoryBucket()
    ours = PurgeMarks(memory, load_keys(Path(bucket.settings.keys)), 60)
    await ours.add(Scope("bad-pool"), 5)
    (path, data), *_ = memory.objects.items()
    moved = f"purges/{'0' * 32}/{9:012x}"
    memory.objects = {moved: data}
    late = PurgeMarks(memory, load_keys(Path(bucket.settings.keys)), 60)
    await late.follow(list(memory.objects))
    assert not late._marks
    memory.objects = {path: data}
    await late.follow(list(memory.objects))
    assert list(late._marks) == [path]
