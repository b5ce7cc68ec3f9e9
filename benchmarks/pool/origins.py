"""Cost of naming blocks in tickets and of keeping their origins.

python -m benchmarks.pool.origins
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from prfaas.core.cache.keep_rules import Origin, Scope
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.shipping import NamedBlocks, manifest_digest, manifest_of
from prfaas.engines.lineage import Lineage
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_segments import SegmentFiles
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.event_feed import EventFeed
from prfaas.pool.store.origins import LOCAL, received
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import block_digest

LAYOUT = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1 << 15),))
NUM_TOKENS = 131_072
NUM_BLOCKS = 20_000
ROUNDS = 20


def best_ms(work: Callable[[], object]) -> float:
    """The fastest of some rounds, milliseconds of CPU time."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - began)
    return min(times) / 1e6


def bytes_each(make: Callable[[], object], count: int) -> float:
    """Memory that each of so many things takes."""
    tracemalloc.start()
    held = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del held
    return size / count


def tickets() -> None:
    """A prompt of 128K tokens in blocks of 16."""
    hashes = [os.urandom(32) for _ in range(NUM_TOKENS // 16)]
    span = {"have_tokens": 0, "final_tokens": NUM_TOKENS}
    manifest = manifest_of(LAYOUT, hashes, **span)
    named = NamedBlocks(manifest)
    keys = [BlockKey(0, name) for name in hashes]
    size = sum(map(len, manifest.values()))
    digest = manifest_digest(manifest)
    print(f"list of {len(hashes):,} blocks: {size:,} bytes; in the ticket {len(digest)}")
    show("made and digested", lambda: manifest_digest(manifest_of(LAYOUT, hashes, **span)))
    show("checked and opened", lambda: (manifest_digest(manifest), NamedBlocks(manifest)))
    show("all blocks looked up", lambda: all(key in named for key in keys))
    held = bytes_each(lambda: NamedBlocks(manifest), len(hashes))
    print(f"  kept while it is open: {held:.0f} bytes a block")


def show(label: str, work: Callable[[], object]) -> None:
    print(f"  {label}: {best_ms(work):.2f} ms")


def memory() -> None:
    """A block's own entry, with and without where it came from."""
    data = memoryview(bytearray(1))

    def stored(origin: Callable[[int], Origin]) -> float:
        return bytes_each(
            lambda: [StoredBlock(data, b"", origin(n // 64)) for n in range(NUM_BLOCKS)], NUM_BLOCKS
        )

    transfers = [n.to_bytes(16, "big") for n in range(NUM_BLOCKS // 64 + 1)]
    received.cache_clear()
    one = stored(lambda _: LOCAL)
    each = stored(lambda n: received("prfaas-pool", transfers[n], is_inherited=False))
    print(f"a block's entry in memory: {one:.0f} bytes; of transfers of 64 blocks {each:.0f}")
    hashes = [os.urandom(32) for _ in range(NUM_BLOCKS)]

    def lineage() -> Lineage[bytes]:
        made: Lineage[bytes] = Lineage()
        made.loaded(hashes, ["prfaas-pool"])
        return made

    remembered = bytes_each(lineage, NUM_BLOCKS)
    print(f"a foreign block that an engine remembers: {remembered:.0f} bytes, and its name")
    known, unknown = lineage(), [os.urandom(32) for _ in range(8192)]
    show("8,192 names asked about", lambda: known.sources(unknown))


async def disk() -> None:
    """Dropping half of what lies on disk."""
    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore(1 << 20, EventFeed())
        tier = DiskTier(SegmentFiles(Path(folder)), 1 << 30, PoolMetrics(), store)
        running = asyncio.create_task(tier.run())
        while not tier.is_ready:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
        data = memoryview(bytearray(1 << 13))
        foreign = received("prfaas-pool", b"t" * 16, is_inherited=False)
        for number in range(NUM_BLOCKS):
            key = BlockKey(0, number.to_bytes(32, "big"))
            digest = block_digest(LAYOUT.layout_id, key, data) if number == 0 else bytes(32)
            block = StoredBlock(data, digest, foreign if number % 2 else LOCAL)
            while not tier.offer((LAYOUT.layout_id, key), block, lambda: None):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        while len(tier) < NUM_BLOCKS:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await tier.drop(Scope("prfaas-pool"))
        took = time.monotonic() - began
        print(
            f"{NUM_BLOCKS - len(tier):,} of {NUM_BLOCKS:,} blocks dropped from disk: {took:.2f} s"
        )
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await tier.close()


if __name__ == "__main__":
    tickets()
    memory()
    asyncio.run(disk())
