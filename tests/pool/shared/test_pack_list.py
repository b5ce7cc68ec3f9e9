"""The list of packs: limits of bytes and of packs, and what is deleted for them."""

from __future__ import annotations

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.keys.sealing import new_seal
from prfaas.pool.keys.site_keys import SiteKey
from prfaas.pool.shared.following import PackList
from prfaas.pool.shared.packs import KIND, Pack, PackedBlock, PackIndex, PackName
from prfaas.pool.store.origins import LOCAL
from tests.s3.memory_bucket import MemoryBucket

LAYOUT = bytes(32)
LIMIT_S = 60.0
KEY = SiteKey(b"k" * 32)


def pack(at_ms: int, writer: str = "pd-pool") -> PackName:
    return PackName(LAYOUT, at_ms, writer, f"{at_ms:016x}", 200)


def bucket_with(*names: PackName) -> MemoryBucket:
    bucket = MemoryBucket()
    bucket.objects |= {name.path: bytes(100) for name in names}
    return bucket


async def test_packs_that_are_new_or_gone_are_noticed() -> None:
    bucket = bucket_with(pack(1), pack(2, "pd-other"))
    packs = PackList(bucket, "pd-pool", 1000)
    assert not await packs.refresh(LIMIT_S)
    assert (set(packs), packs.used_bytes) == ({pack(1), pack(2, "pd-other")}, 100)
    del bucket.objects[pack(1).path]
    packs.add(pack(3), 70)
    assert set(await packs.refresh(LIMIT_S)) == {pack(1), pack(3)}
    assert packs.used_bytes == 0


async def test_own_packs_beyond_the_limit_of_bytes_go_the_oldest_first() -> None:
    others = [pack(n, "pd-other") for n in range(5)]
    bucket = bucket_with(*others, *(pack(n) for n in range(10, 20)))
    packs = PackList(bucket, "pd-pool", 350)
    await packs.refresh(LIMIT_S)
    victims = packs.beyond_limits()
    assert victims == [pack(n) for n in range(10, 17)]
    await packs.delete(victims, LIMIT_S)
    assert packs.used_bytes == 300
    assert not packs.beyond_limits()
    assert bucket.objects.keys() == {name.path for name in [*others, *map(pack, (17, 18, 19))]}


async def test_of_too_many_packs_the_newest_are_known_and_own_old_ones_go() -> None:
    """A site that writes many small packs keeps its tier, and its list stays bounded."""
    names = [pack(n, "pd-pool" if n % 2 else "pd-other") for n in range(100)]
    bucket = bucket_with(*names)
    packs = PackList(bucket, "pd-pool", 10**6, packs_max=30)
    await packs.refresh(LIMIT_S)
    assert set(packs) == set(names[70:])
    assert packs.num_ignored == 70
    victims = packs.beyond_limits()
    assert set(victims) == set(names[1:70:2])
    await packs.delete(victims, LIMIT_S)
    await packs.refresh(LIMIT_S)
    assert packs.num_ignored == 35, "those of another node"
    assert not packs.beyond_limits()


async def test_the_newest_packs_of_a_layout_come_first() -> None:
    packs = PackList(bucket_with(*(pack(n) for n in range(5))), "pd-pool", 10**6)
    await packs.refresh(LIMIT_S)
    assert await packs.newest_first({LAYOUT}, {pack(3)}) == [pack(n) for n in (4, 2, 1, 0)]
    assert not await packs.newest_first({b"x" * 32}, frozenset())


def test_a_pack_that_is_listed_while_it_is_written_goes_as_a_whole() -> None:
    """Otherwise its blocks would be found, and never be read, until a restart."""
    name, index = pack(1), PackIndex()
    place = PackedBlock(Pack(name, new_seal(KIND, KEY)), 1, 200, 10, bytes(32), LOCAL, "none/1")
    blocks = {(LAYOUT, BlockKey(0, bytes(32))): place}
    assert index.add(name, blocks) == list(blocks)
    assert index.add(name, blocks) == []
    index.validate()
    assert index.remove([name]) == list(blocks)
    assert not list(index)
    index.validate()
