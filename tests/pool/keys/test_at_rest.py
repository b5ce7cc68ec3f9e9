"""Remains of pool nodes on disk and in a bucket: no block in the clear, and of a tenant nothing."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.pool.keys.keyring import FILE_NAME
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.store.disk_segments import SegmentFiles
from prfaas.wire.messages.engine import HIT, MISS
from prfaas.wire.messages.gateway import OrderDone
from tests.orders import purge, purge_end
from tests.pool.conftest import World
from tests.pool.killed_node import KEYS, SPILLED, Killed
from tests.pool.purges import ask, fails, on_disk
from tests.pool.shared_sites import OTHER, all_written, loads_right, start, tier_of
from tests.pool.sites import HASHES, content, dial_port, subscribe, until
from tests.s3.fixtures import Bucket

pytestmark = pytest.mark.timeout(300)
GONE, KEPT = tenant_tag("gone"), tenant_tag("kept")
MINE, OTHERS = KEYS[:48], KEYS[100:148]
STEP = 12
BLOCKS = [BlockKey(0, block_hash) for block_hash in HASHES[300:332]]


def shown(data: Collection[bytes], keys: Collection[BlockKey]) -> int:
    """Number of blocks of which some file has a part."""
    return sum(any(content(key)[4:20] in each for each in data) for key in keys)


def site_keys(path: Path) -> Path:
    path.write_bytes(base64.b64encode(b"k" * 32))
    path.chmod(0o600)
    return path


@pytest.fixture
async def node(identities: Path, tmp_path: Path) -> AsyncIterator[Killed]:
    made = Killed(identities, tmp_path)
    made.options = ("--disk-keys", str(site_keys(tmp_path / "site.keys")))
    made.options += ("--audit", str(tmp_path / "audit"))
    yield made
    await made.kill()
    await asyncio.to_thread(made.engine.close)


async def with_two_tenants(node: Killed) -> None:
    """Store blocks of two tenants, nearly all of which have to go to disk."""
    await node.start()
    spilled = 0.0
    while spilled < 80:
        # What a slow disk did not take in time was dropped, and is stored again.
        for at in range(0, len(MINE), STEP):
            await node.store(MINE[at : at + STEP], GONE)
            await node.store(OTHERS[at : at + STEP], KEPT)
        spilled = (await node.metrics()).get(SPILLED, 0.0)


def image(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_the_disk_of_a_process_shows_no_block(node: Killed, is_sealed: bool) -> None:
    """The other case shows that the search finds blocks."""
    if not is_sealed:
        node.options = ()
    await with_two_tenants(node)
    await node.kill()
    found = shown(image(node.disk), [*MINE, *OTHERS])
    assert (found == 0) if is_sealed else (found >= 80)
    await node.start()
    assert len(await node.found()) >= 40


@pytest.mark.parametrize("crash", [True, False])
async def test_after_a_purge_and_a_kill_nothing_of_a_tenant_can_be_read(
    node: Killed, crash: bool
) -> None:
    """Killed at once, before an answer, or after it; the keys that were there are not enough."""
    await with_two_tenants(node)
    gateway = await dial_port(node.port, node.identities, "gateway")
    keyring = json.loads((node.disk / FILE_NAME).read_bytes())
    assert {key["tenant"] for key in keyring["keys"]} == {GONE, KEPT}
    gateway.channel.send(purge(job=1, tenant=GONE))
    if crash:
        await until(lambda: GONE not in (node.disk / FILE_NAME).read_text())
    else:
        await until(lambda: gateway.of(OrderDone))
        [answer] = [message for message in gateway.messages if isinstance(message, OrderDone)]
        assert (answer.problem, answer.num_blocks > 0) == ("", True)
    await node.kill()
    keyring = json.loads((node.disk / FILE_NAME).read_bytes())
    assert {key["tenant"] for key in keyring["keys"]} == {KEPT}
    await node.start()
    found = await node.found()
    assert found
    assert found <= set(OTHERS)
    gateway.channel.close("done")
    if not crash:
        await node.kill()
        log = b"".join(path.read_bytes() for path in (node.folder / "audit").glob("*.jsonl"))
        receipts = [json.loads(line) for line in log.splitlines() if b'"purge"' in line]
        assert [(each["tenant"], each["outcome"]) for each in receipts] == [(GONE, "complete")]
        assert receipts[0]["blocks"] == answer.num_blocks


async def test_a_receipt_that_is_not_in_the_audit_log_is_no_receipt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd = await world.start_pd()

    async def written() -> bool:
        return False

    monkeypatch.setattr(pd.node.facts, "kept", written)
    gateway = await subscribe(pd, world.identities)
    answer = await ask(gateway, source="", tenant=GONE)
    assert answer.problem == "the audit log cannot be written"
    gateway.channel.close("done")


async def test_records_are_marked_where_a_key_cannot_be_destroyed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"disk": tmp_path / "disk", "disk_bytes": 1 << 20}
    options["disk_keys"] = site_keys(tmp_path / "site.keys")
    pd = await world.start_pd(**options)
    engine = await world.engine("pd-pool")
    assert await engine.store(BLOCKS[:4], tenant=GONE)
    assert await engine.store(BLOCKS[4:8], tenant=KEPT)
    await on_disk(pd)
    monkeypatch.setattr(SegmentFiles, "destroy_keys", fails)
    gateway = await subscribe(pd, world.identities)
    assert "the tenant's keys: no space" in (await ask(gateway, source="", tenant=GONE)).problem
    gateway.channel.close("done")
    await pd.kill()
    again = await world.start_pd(**options)
    assert again.node.disk is not None
    disk = again.node.disk
    await until(lambda: disk.is_ready)
    assert {key for _, key in disk.names()} == set(BLOCKS[4:8])


# --- a bucket ---


async def test_a_bucket_has_no_block_in_the_clear_and_after_a_purge_no_key(
    world: World, bucket: Bucket
) -> None:
    first = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(BLOCKS[:16], tenant=GONE)
    assert await engine.store(BLOCKS[16:], tenant=KEPT)
    await all_written(first, len(BLOCKS))
    second = await start(world, bucket.settings, OTHER)
    other = await world.engine(OTHER)
    assert await other.look_up(BLOCKS) == [HIT] * len(BLOCKS)
    assert await loads_right(other, BLOCKS[:4]) == [True] * 4
    before = {path: await bucket.data(path) for path in await bucket.everything()}
    assert shown(before.values(), BLOCKS) == 0
    assert {path.split("/")[1] for path in before if path.startswith("keys/")} == {GONE, KEPT}

    gateways = [await subscribe(site, world.identities) for site in (first, second)]
    for number, gateway in enumerate(gateways):
        answer = await ask(gateway, job=number + 1, source="", tenant=GONE)
        assert answer.problem == ""
    after = await bucket.everything()
    assert not [path for path in after if path.startswith(f"keys/{GONE}")]
    for site in (first, second):
        assert site.held() == set(BLOCKS[16:])
    for site, gateway in zip((first, second), gateways, strict=True):
        gateway.channel.send(purge_end(job=9, tenant=GONE))
        await until(lambda rules=site.node.store.rules: not rules.orders)  # type: ignore[misc]
        gateway.channel.close("done")

    # A new node, with the key of the site, finds the other tenant's blocks alone.
    third = await start(world, bucket.settings, "pd-third")
    late = await world.engine("pd-third")
    assert await late.look_up(BLOCKS) == [MISS] * 16 + [HIT] * 16
    assert await loads_right(late, BLOCKS[16:]) == [True] * 16
    assert len(tier_of(third)) == 16
    assert third.metric("pool_shared_unreadable_total", reason="altered") == 0
    # The tenant comes back, with another key.
    assert await engine.store(BLOCKS[:4], tenant=GONE)
    await all_written(third, 20)
    assert await loads_right(late, BLOCKS[:4]) == [True] * 4


async def test_a_pack_with_blocks_of_two_tenants_loses_those_of_one(
    world: World, bucket: Bucket
) -> None:
    settings = bucket.changed(timing=bucket.timed(flush_s=60))
    site = await start(world, settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(BLOCKS[:16], tenant=GONE)
    assert await engine.store(BLOCKS[16:], tenant=KEPT)
    await tier_of(site)._writer.flush()
    await until(lambda: len(tier_of(site)) == len(BLOCKS))
    [pack] = await bucket.objects()
    gateway = await subscribe(site, world.identities)
    purged = await ask(gateway, source="", tenant=GONE)
    assert (purged.num_blocks, purged.problem) == (16, "")
    gateway.channel.close("done")
    assert list(await bucket.objects()) == [pack], "the other tenant's blocks are in it"
    late = await start(world, settings, OTHER)
    other = await world.engine(OTHER)
    assert await other.look_up(BLOCKS) == [MISS] * 16 + [HIT] * 16
    assert await loads_right(other, BLOCKS[16:]) == [True] * 16
    assert late.held() == set(BLOCKS[16:])


async def test_the_key_of_the_site_alone_opens_no_block_in_a_bucket(
    world: World, bucket: Bucket
) -> None:
    site = await start(world, bucket.settings)
    engine = await world.engine("pd-pool")
    assert await engine.store(BLOCKS, tenant=GONE)
    await all_written(site, len(BLOCKS))
    place = tier_of(site).place_of(next(iter(tier_of(site).names())))
    assert place is not None
    sealed = (await bucket.data(place.pack.name.path))[place.offset :][: place.num_bytes + 16]
    assert load_keys(bucket.settings.keys).sealing.id in place.pack.seal.head
    with contextlib.suppress(Exception):
        plain = place.pack.seal.open(place.part, sealed)
        pytest.fail(f"the site's key opened {len(plain)} bytes")
