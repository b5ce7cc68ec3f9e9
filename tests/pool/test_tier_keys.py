"""Keys of tenants in a bucket: rotation of the site's key, and purges under way."""

import asyncio
from pathlib import Path

from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.keys.wrapping import SiteKeyWrapper
from prfaas.pool.shared.tier_keys import TierKeys, ref_of
from tests.s3.fixtures import Bucket

from .segment_files import site_keys

TENANT, LIMIT_S = "a" * 32, 60.0
OLD, NEW = b"o" * 32, b"n" * 32


def wrapper(path: Path, *secrets: bytes) -> SiteKeyWrapper:
    return SiteKeyWrapper(load_keys(site_keys(path, *secrets)))


async def test_after_a_rotation_nothing_new_needs_the_old_key_of_the_site(
    bucket: Bucket, tmp_path: Path
) -> None:
    before = await TierKeys(bucket.direct, wrapper(tmp_path / "1", OLD), LIMIT_S).sealing(TENANT)
    keys = TierKeys(bucket.direct, wrapper(tmp_path / "2", NEW, OLD), LIMIT_S)
    assert await keys.get(ref_of(before)) == before, "what is there can be read"
    after = await keys.sealing(TENANT)
    assert after.id != before.id
    unknown: list[None] = []
    late = TierKeys(
        bucket.direct,
        wrapper(tmp_path / "3", NEW),
        LIMIT_S,
        on_unknown=lambda: unknown.append(None),
    )
    assert await late.get(ref_of(after)) == after
    assert await late.get(ref_of(before)) is None
    assert len(unknown) == 1
    assert await late.sealing(TENANT) == after


async def test_a_key_that_was_being_read_does_not_outlive_its_destruction(
    bucket: Bucket, tmp_path: Path
) -> None:
    site = wrapper(tmp_path / "1", OLD)
    ref = ref_of(await TierKeys(bucket.direct, site, LIMIT_S).sealing(TENANT))
    keys, has_read, go_on = TierKeys(bucket.direct, site, LIMIT_S), asyncio.Event(), asyncio.Event()
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
