"""The tier in an S3 bucket: throughput against the bare client, faults, and 100,000 objects.

python -m benchmarks.pool.shared_tier [throughput | faults | index | clients]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import secrets
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import aiohttp

from prfaas.core.kv.blocks import BlockKey, BlockName, CacheGroup, GroupKind, Layout
from prfaas.pool.keys.site_keys import SiteKey, load_keys
from prfaas.pool.keys.tenant_keys import TenantKey
from prfaas.pool.keys.wrapping import SiteKeyWrapper
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket, S3Bucket
from prfaas.pool.shared.packs import PackBuilder
from prfaas.pool.shared.purge_marks import PurgeMarks
from prfaas.pool.shared.s3_tier import S3Tier
from prfaas.pool.shared.settings import S3Settings
from prfaas.pool.shared.tier_keys import TierKeys
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.event_feed import EventFeed
from prfaas.pool.store.origins import LOCAL
from prfaas.pool.store.tier_ports import ReadBudget, StoredBlock
from prfaas.wire.fragments import block_digest
from tests.s3.faulty import Fault, FaultyS3
from tests.s3.memory_bucket import MemoryBucket
from tests.s3.server import running_server

GROUP = CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1 << 20)
LAYOUT = Layout(b"L" * 32, 16, "0", (GROUP,))
BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 96
ROUNDS = 3
NUM_PACKS, BLOCKS_A_PACK = 100_000, 10
LIMIT_S = 60.0
TICK_S = 0.005
FAULTS = [Fault.ERRORS, Fault.BUSY, Fault.SLOW, Fault.BLACKHOLE, Fault.RESET, Fault.CUT]


def settings_in(folder: Path, endpoint: str = "", bucket: str = "blocks") -> S3Settings:
    """A bucket with a new key."""
    keys = folder / "site.keys"
    keys.write_text(base64.b64encode(secrets.token_bytes(32)).decode())
    keys.chmod(0o600)
    return S3Settings(
        bucket, keys, 1 << 40, endpoint=endpoint or None, region="us-east-1", deadline_ns=60 * 10**9
    )


def tier_over(settings: S3Settings, bucket: Bucket, metrics: PoolMetrics | None = None) -> S3Tier:
    """A tier below an empty store."""
    keys, store = load_keys(settings.keys), BlockStore(1 << 20, EventFeed())
    return S3Tier(settings, bucket, keys, "pool", set(), metrics or PoolMetrics(), store)


async def until_listed(tier: S3Tier, num_blocks: int) -> None:
    """Wait for so many blocks."""
    while len(tier) < num_blocks:  # noqa: ASYNC110 - a tier signals nothing
        await asyncio.sleep(TICK_S)


async def throughput() -> None:
    """Put and get of the same bytes: bare objects of 16 MiB and ranges of them, and the tier."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with tempfile.TemporaryDirectory() as folder, running_server() as port:
        endpoint = f"http://127.0.0.1:{port}"
        print("| round | put, bare | put, tier | get, bare | get, tier |\n|---|---|---|---|---|")
        for number in range(ROUNDS):
            name = f"blocks-{number}"
            async with aiohttp.ClientSession() as http, http.put(f"{endpoint}/{name}"):
                pass
            bare = await _bare(S3Bucket(settings_in(Path(folder), endpoint, name)))
            tier = await _tier(settings_in(Path(folder), endpoint, name))
            mib = NUM_BLOCKS * BLOCK_BYTES / 2**20
            cells = (
                f"{mib / bare[0]:.0f} MiB/s",
                f"{bare[0] / tier[0]:.2f}x",
                f"{mib / bare[1]:.0f} MiB/s",
                f"{bare[1] / tier[1]:.2f}x",
            )
            print(f"| {number + 1} | {' | '.join(cells)} |", flush=True)


async def _bare(bucket: S3Bucket) -> tuple[float, float]:
    """Seconds of put and get, four and eight requests at a time."""
    blocks_each = (16 << 20) // BLOCK_BYTES
    data = os.urandom(16 << 20)
    paths = [f"bare/{number}" for number in range(NUM_BLOCKS // blocks_each)]
    began = time.perf_counter()
    await asyncio.gather(*(bucket.write(path, data, LIMIT_S) for path in paths))
    put_s = time.perf_counter() - began
    slots = asyncio.Semaphore(8)

    async def read(path: str, start: int) -> None:
        async with slots:
            await bucket.read(path, start, BLOCK_BYTES, LIMIT_S)

    ranges = [(path, n * BLOCK_BYTES) for path in paths for n in range(blocks_each)]
    began = time.perf_counter()
    await asyncio.gather(*(read(path, start) for path, start in ranges))
    get_s = time.perf_counter() - began
    await bucket.delete(paths, LIMIT_S)
    return put_s, get_s


async def _tier(settings: S3Settings) -> tuple[float, float]:
    """Seconds of the same through the tier: sealing and digests included."""
    writer, reader = (tier_over(settings, S3Bucket(settings)) for _ in range(2))
    tasks = [asyncio.create_task(tier.run()) for tier in (writer, reader)]
    names = [(LAYOUT.layout_id, BlockKey(0, n.to_bytes(32, "big"))) for n in range(NUM_BLOCKS)]
    data = bytearray(os.urandom(BLOCK_BYTES))
    blocks = {name: StoredBlock(data, block_digest(*name, data), LOCAL) for name in names}
    began = time.perf_counter()
    for name, block in blocks.items():
        while not writer.offer(name, block, lambda: None):  # noqa: ASYNC110 - nor does a full one
            await asyncio.sleep(TICK_S)
    await writer._writer.flush()
    put_s = time.perf_counter() - began
    reader.learn(LAYOUT)
    await until_listed(reader, NUM_BLOCKS)
    slots = asyncio.Semaphore(8)

    async def read(name: BlockName) -> None:
        async with slots:
            into = memoryview(bytearray(BLOCK_BYTES))
            assert await reader.read(name, into, ReadBudget()) == blocks[name].digest

    began = time.perf_counter()
    await asyncio.gather(*(read(name) for name in names))
    get_s = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for tier in (writer, reader):
        await tier.close()
    return put_s, get_s


async def faults() -> None:
    """A bucket that fails under load: until the tier is closed, and the longest request."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    print("| fault | closed after | longest request | reads: late or failed |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, running_server() as port:
        async with FaultyS3(port).serving() as s3:
            for fault in FAULTS:
                async with aiohttp.ClientSession() as http, http.put(f"{s3.url}/{fault}"):
                    pass
                settings = settings_in(Path(folder), s3.url, str(fault))
                settings = replace(settings, deadline_ns=10**9)
                await _fault(s3, fault, settings)
                s3.fault = None


async def _fault(s3: FaultyS3, fault: Fault, settings: S3Settings) -> None:
    metrics = PoolMetrics()
    tier = tier_over(settings, S3Bucket(settings), metrics)
    task = asyncio.create_task(tier.run())
    names = [(LAYOUT.layout_id, BlockKey(0, n.to_bytes(32, "big"))) for n in range(NUM_BLOCKS)]
    data = bytearray(os.urandom(1 << 16))
    for name in names:
        block = StoredBlock(data, block_digest(*name, data), LOCAL)
        assert tier.offer(name, block, lambda: None)
    await tier._writer.flush()
    tier.learn(LAYOUT)
    times: list[float] = []

    async def request(part: list[BlockName]) -> None:
        """Eight reads at a time, as `EngineRequests` does it."""
        budget, began = ReadBudget(settings.deadline_s), time.perf_counter()
        for start in range(0, len(part), 8):
            reads = (
                tier.read(name, memoryview(bytearray(len(data))), budget)
                for name in part[start : start + 8]
            )
            await asyncio.gather(*reads)
        times.append(time.perf_counter() - began)

    async def client(number: int) -> None:
        part = names[number * 12 : number * 12 + 24]
        while len(tier):
            await request(part)
            await asyncio.sleep(TICK_S)

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    while len(times) < 20:  # noqa: ASYNC110 - until there is load
        await asyncio.sleep(TICK_S)
    times.clear()
    s3.fault, began = fault, time.perf_counter()
    while len(tier):  # noqa: ASYNC110 - a tier signals nothing
        await asyncio.sleep(TICK_S)
    closed_s = time.perf_counter() - began
    await asyncio.gather(*clients)
    reads = metrics.shared_requests
    bad = [reads.labels(operation="read", outcome=kind)._value.get() for kind in ("late", "failed")]
    cells = f"{closed_s:.2f} s", f"{max(times):.2f} s", f"{bad[0]:.0f}, {bad[1]:.0f}"
    print(f"| {fault} | {' | '.join(cells)} |", flush=True)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    s3.fault = None
    await tier.close()


LIMIT_S = 60.0


async def index() -> None:
    """A node that starts with a full bucket, in memory: what list and index take of it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_in(Path(folder))
        bucket, keys = MemoryBucket(), load_keys(settings.keys)
        marks, wrapper = PurgeMarks(bucket, keys, LIMIT_S), SiteKeyWrapper(keys)
        of = await TierKeys(bucket, wrapper, marks, PoolMetrics(), LIMIT_S).sealing("")
        for number in range(NUM_PACKS):
            path, data = _front(keys.sealing, of, number)
            bucket.objects[path] = data
        for is_traced in (False, True):
            await _start(settings, bucket, is_traced=is_traced)


def _front(key: SiteKey, of: TenantKey, number: int) -> tuple[str, bytes]:
    """A pack of tiny blocks."""
    builder = PackBuilder(key, LAYOUT.layout_id)
    for n in range(BLOCKS_A_PACK):
        block_hash = (number * BLOCKS_A_PACK + n).to_bytes(32, "big")
        builder.add(BlockKey(0, block_hash), b"x", bytes(32), LOCAL, of)
    name, data = builder.finish("other", number)
    return name.path, data


async def _start(settings: S3Settings, bucket: MemoryBucket, *, is_traced: bool) -> None:
    if is_traced:
        tracemalloc.start()
    tier = tier_over(settings, bucket)
    task = asyncio.create_task(tier.run())
    began, longest_s, half_s, probe_s = time.perf_counter(), 0.0, 0.0, 0.0
    tier.learn(LAYOUT)
    last = began
    while not tier.is_listed:
        if tier.needs_probe:
            await tier.probe([])
            probe_s = time.perf_counter() - began
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last - 2 * probe_s * (last == began)), now
        if not half_s and len(tier) >= NUM_PACKS * BLOCKS_A_PACK / 2:
            half_s = now - began
    whole_s = time.perf_counter() - began
    if is_traced:
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        print(f"memory: {size / 2**20:.0f} MiB, {size / len(tier):.0f} bytes a block")
    else:
        print(f"{NUM_PACKS:,} packs, {len(tier):,} blocks, {bucket.requests['list']} lists")
        print(f"look-ups wait {probe_s:.2f} s in all; half is found after {half_s:.1f} s")
        print(f"all after {whole_s:.1f} s of this process; longest turn {longest_s * 1e3:.0f} ms")
        await _again(tier)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await tier.close()


async def _again(tier: S3Tier) -> None:
    """A refresh that finds nothing new."""
    began = last = time.perf_counter()
    longest_s = 0.0
    refresh = asyncio.create_task(tier._follower._refresh())
    while not refresh.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now
    took_s = time.perf_counter() - began
    print(f"a later list: {took_s:.2f} s, longest turn {longest_s * 1e3:.0f} ms")


async def clients() -> None:
    """Clients of a gateway while the bucket fails."""
    from benchmarks.pool import bucket_faults

    await bucket_faults.clients()


PARTS = {"throughput": throughput, "faults": faults, "index": index, "clients": clients}


def main() -> None:
    """Run one part, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=list(PARTS))
    what = parser.parse_args().what
    for name, part in PARTS.items():
        if what in (None, name):
            asyncio.run(part())


if __name__ == "__main__":
    main()
