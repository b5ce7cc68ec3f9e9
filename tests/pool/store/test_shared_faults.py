"""A bucket that fails: no wrong byte, no failed engine, a bounded wait, then misses at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.store.tier_ports import ReadBudget
from prfaas.wire.messages.engine import HIT, MISS, Load
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import Evicted
from tests.pool.conftest import World
from tests.pool.shared_sites import OTHER, all_written, loads_right, num_keys, start, tier_of
from tests.pool.sites import HASHES, LAYOUT, Engine, Site, content, subscribe, until
from tests.s3.faulty import Fault
from tests.s3.fixtures import Bucket

pytestmark = pytest.mark.timeout(300)
KEYS = [BlockKey(0, block_hash) for block_hash in HASHES[256:288]]
DEADLINE_S = 4.0
"""Long enough for a read on a busy machine."""
BUSY_S = 20.0
"""Time that a machine with other work may add; faults that are not bounded last a minute."""
UNTIL_OPEN = [Fault.ERRORS, Fault.BUSY, Fault.SLOW, Fault.BLACKHOLE, Fault.RESET, Fault.CUT]
BROKEN = [Fault.TRUNCATED, Fault.ALTERED]


async def filled(world: World, bucket: Bucket, **times: float) -> tuple[Site, Engine]:
    """A node whose bucket another one has filled, and its engine."""
    first = await start(world, bucket.changed(endpoint=bucket.s3.url))
    engine = await world.engine("pd-pool")
    assert await engine.store(KEYS)
    await all_written(first, len(KEYS))
    limited = bucket.changed(deadline_ns=int(DEADLINE_S * 1e9), timing=bucket.timed(**times))
    site = await start(world, limited, OTHER)
    other = await world.engine(OTHER)
    await all_written(site, len(KEYS))
    return site, other


@pytest.mark.parametrize("fault", UNTIL_OPEN)
async def test_a_bucket_that_fails_costs_one_deadline_and_then_nothing(
    world: World, bucket: Bucket, fault: Fault
) -> None:
    site, engine = await filled(world, bucket, request_s=2.0)
    watch = await subscribe(site, world.identities)
    bucket.s3.fault = fault
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS), "a hint"
    began_s = time.monotonic()
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert time.monotonic() - began_s < DEADLINE_S + BUSY_S
    assert site.metric("pool_shared_up") == 0, "one load is enough"
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    reads = bucket.s3.requests["GET"]
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert bucket.s3.requests["GET"] - reads <= 2, "only the request that asks if it is back"
    await until(lambda: num_keys(watch, Evicted) == len(KEYS))

    bucket.s3.fault = None
    await all_written(site, len(KEYS))
    assert await engine.look_up(KEYS) == [HIT] * len(KEYS)
    while not all(await loads_right(engine, KEYS)):
        pass
    watch.channel.close("done")


@pytest.mark.parametrize("fault", BROKEN)
async def test_broken_answers_are_misses_and_stay_misses(
    world: World, bucket: Bucket, fault: Fault
) -> None:
    site, engine = await filled(world, bucket)
    bucket.s3.fault = fault
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert site.metric("pool_shared_up") == 0, "as many in a row are no damaged object"
    bucket.s3.fault = None
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    requests = {"operation": "read", "outcome": "altered"}
    num_altered = site.metric("pool_shared_requests_total", **requests)
    assert num_altered == site.metric("pool_shared_unreadable_total", reason="altered") >= 1


async def test_an_answer_that_is_altered_once_is_read_again(world: World, bucket: Bucket) -> None:
    site, engine = await filled(world, bucket)
    bucket.s3.fault, bucket.s3.faults_left = Fault.ALTERED, 1
    bucket.s3.methods = frozenset({"GET"})
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    assert site.metric("pool_shared_requests_total", operation="read", outcome="altered") == 1


async def test_a_block_that_was_altered_is_found_again_after_a_while(
    world: World, bucket: Bucket
) -> None:
    site, engine = await filled(world, bucket, reread_s=1.0)
    watch = await subscribe(site, world.identities)
    bucket.s3.fault, bucket.s3.methods = Fault.ALTERED, frozenset({"GET"})
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    bucket.s3.fault = None
    await until(lambda: num_keys(watch, Evicted) >= len(KEYS))
    await all_written(site, len(KEYS))
    assert await loads_right(engine, KEYS) == [True] * len(KEYS)
    watch.channel.close("done")


async def test_objects_that_are_cut_short_in_the_bucket_are_misses(
    world: World, bucket: Bucket
) -> None:
    site, engine = await filled(world, bucket)
    kept = {path: size // 2 for path, size in (await bucket.objects()).items()}
    for path, size in kept.items():
        await bucket.direct.write(path, (await bucket.data(path))[:size], 60)
    places = [tier_of(site).place_of((LAYOUT.layout_id, key)) for key in KEYS]
    whole = [
        p is not None and p.offset + p.num_bytes + 16 <= kept[p.pack.name.path] for p in places
    ]
    assert await loads_right(engine, KEYS) == whole, "blocks before the cut can be read"
    assert site.metric("pool_shared_up") == 1


async def test_a_block_under_the_name_of_another_one_is_a_miss(
    world: World, bucket: Bucket
) -> None:
    """A writer to the bucket can swap objects; the result is misses."""
    site, engine = await filled(world, bucket)
    assert await engine.store([BlockKey(0, HASHES[1])])
    await all_written(site, len(KEYS) + 1)
    paths = list(await bucket.objects())
    data = [await bucket.data(path) for path in paths]
    for number, path in enumerate(paths):
        await bucket.direct.write(path, data[number - 1], 60)
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)


async def test_packs_that_were_deleted_are_misses_and_no_failure(
    world: World, bucket: Bucket
) -> None:
    site, engine = await filled(world, bucket)
    # No list shows it: the reads find out.
    bucket.s3.fault, bucket.s3.methods = Fault.BLACKHOLE, frozenset({"LIST"})
    await bucket.direct.delete(list(await bucket.objects()), 60)
    assert await loads_right(engine, KEYS) == [False] * len(KEYS)
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    assert site.metric("pool_shared_up") == 1


async def test_the_loads_of_a_request_share_one_deadline(
    world: World, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each read is slow, and none too slow."""
    limits: list[float | None] = []
    left = ReadBudget.__dict__["left_s"].fget

    def watched(budget: ReadBudget) -> float | None:
        limits.append(left(budget))
        return limits[-1]

    monkeypatch.setattr(ReadBudget, "left_s", property(watched))
    _, engine = await filled(world, bucket)

    async def load(request: str, part: list[BlockKey]) -> None:
        keys, rows = wire_keys(part), list(range(len(part)))
        done = await engine.finish(Load(job=engine.job(), keys=keys, rows=rows, request=request))
        assert done.ok

    for start_at in range(0, 16, 4):
        await load("one", KEYS[start_at : start_at + 4])
    assert limits == sorted(limits, key=lambda left_s: -(left_s or 0)), "it only becomes less"
    assert limits[0] == DEADLINE_S
    assert (limits[-1] or 0) < DEADLINE_S
    await load("two", KEYS[16:20])
    assert limits[16] == DEADLINE_S, "another request has its own"


def test_a_budget_starts_with_the_first_read() -> None:
    now_s = [5.0]
    budget = ReadBudget(2.0, lambda: now_s[0])
    now_s[0] = 100.0
    assert budget.left_s == 2.0
    now_s[0] = 101.5
    assert budget.left_s == 0.5
    now_s[0] = 200.0
    assert budget.left_s == 0.0
    assert ReadBudget(None).left_s is None


async def test_a_bucket_that_cannot_be_reached_at_start_delays_no_lookup_twice(
    world: World, bucket: Bucket
) -> None:
    bucket.s3.fault = Fault.RESET
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    assert await engine.store(KEYS)
    assert await loads_right(engine, KEYS) == [True] * len(KEYS), "from memory"
    bucket.s3.fault = None
    await until(lambda: tier_of(site).is_listed)


async def test_look_ups_wait_for_a_list_that_does_not_come_once_and_not_each(
    world: World, bucket: Bucket
) -> None:
    bucket.s3.fault, bucket.s3.methods = Fault.BLACKHOLE, frozenset({"LIST"})
    site = await start(world, bucket.changed(timing=bucket.timed(probe_s=0.2)))
    engine = await world.engine("pd-pool")
    assert tier_of(site).needs_probe
    assert await engine.look_up(KEYS) == [MISS] * len(KEYS)
    assert not tier_of(site).needs_probe, "the list is still under way"
    assert not tier_of(site).is_listed


async def test_engines_work_while_answers_fail_now_and_then(world: World, bucket: Bucket) -> None:
    """Faults of all kinds in turns, under loads: what comes is right, and the rest is a miss."""
    site, engine = await filled(world, bucket)
    num_good = 0
    for fault in [None, *UNTIL_OPEN, *BROKEN, None]:
        bucket.s3.fault = fault
        for _ in range(3):
            num_good += sum(await loads_right(engine, KEYS))
            for name in site.node.store.in_memory():
                site.node.store.discard(*name)
            await asyncio.sleep(0)
    assert num_good >= len(KEYS)
    assert len(site.node.store) == 0
    assert content(KEYS[0])
