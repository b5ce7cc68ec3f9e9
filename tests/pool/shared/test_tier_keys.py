"""Keys of tenants in a bucket: rotation of the site's key, and purges under way."""

import asyncio
from pathlib import Path

from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.keys.wrapping import SiteKeyWrapper
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.purge_marks import PurgeMarks
from prfaas.pool.shared.tier_keys import TierKeys
from tests.pool.segment_files import site_keys
from tests.s3.fixtures import Bucket

TENANT, LIMIT_S = "a" * 32, 60.0
OLD, NEW = b"o" * 32, b"n" * 32


def wrapper(path: Path, *secrets: bytes) -> SiteKeyWrapper:
    return SiteKeyWrapper(load_keys(site_keys(path, *secrets)))


def keys_of(bucket: Bucket, site: SiteKeyWrapper, metrics: PoolMetrics | None = None) -> TierKeys:
    marks = PurgeMarks(bucket.direct, load_keys(bucket.settings.keys), LIMIT_S)
    return TierKeys(bucket.direct, site, marks, metrics or PoolMetrics(), LIMIT_S)


async def test_after_a_rotation_nothing_new_needs_the_old_key_of_the_site(
    bucket: Bucket, tmp_path: Path
) -> None:
    before = await keys_of(bucket, wrapper(tmp_path / "1", OLD)).sealing(TENANT)
    keys = keys_of(bucket, wrapper(tmp_path / "2", NEW, OLD))
    assert await keys.get(before.ref) == before, "what is there can be read"
    after = await keys.sealing(TENANT)
    assert after.id != before.id
    metrics = PoolMetrics()
    late = keys_of(bucket, wrapper(tmp_path / "3", NEW), metrics)
    assert await late.get(after.ref) == after
    assert await late.get(before.ref) is None
    unknown = metrics.registry.get_sample_value(
        "prfaas_pool_shared_unreadable_total", {"reason": "unknown_key"}
    )
    assert unknown == 1
    assert await late.sealing(TENANT) == after


async def test_a_key_that_was_being_read_does_not_outlive_its_destruction(
    bucket: Bucket, tmp_path: Path
) -> None:
    site = wrapper(tmp_path / "1", OLD)
    ref = (await keys_of(bucket, site).sealing(TENANT)).ref
    keys, has_read, go_on = keys_of(bucket, site), asyncio.Event(), asyncio.Event()
    real = keys._read

    async def read(*args: str) -> object:
        key = await real(*args)
        has_read.set()
        await go_on.wait()
        return key

    vars(keys)["_read"] = read
    reading = asyncio.create_task(keys.get(ref))
    await has_read.wait()
    assert await keys.destroy(TENANT) == 1
    go_on.set()
    assert await reading is None
    assert keys._known == {}
