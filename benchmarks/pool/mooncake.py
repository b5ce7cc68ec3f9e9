"""The tier in a Mooncake Store against the raw client, and what it costs clients when it fails.

    python -m benchmarks.pool.mooncake writes [--rounds 5]
    python -m benchmarks.pool.mooncake faults [--seconds 8]

`writes`: blocks are written to one store over loopback, in turns by the raw client (`put_from` a
registered buffer, the library's fastest call), and by the tier of a pool node: queue, sealing, its
client's process. Sealing alone, on one thread, is counted apart.

`faults`: a gateway, a pool node and timing engines under load; a provider, the master or the client
is killed or stopped. A streamed answer is compared with that of an engine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.core.cache.keep_rules import KeepRules, Scope
from prfaas.core.kv.blocks import BlockKey, BlockName, CacheGroup, GroupKind, Layout
from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.mooncake.mooncake_tier import MooncakeTier
from prfaas.pool.shared.mooncake.sealed_block import seal_block, sealed_bytes_max
from prfaas.pool.shared.mooncake.settings import MooncakeSettings
from prfaas.pool.store.tier_ports import LowerTier, StoredBlock
from prfaas.wire.fragments import block_digest
from tests.mooncake import store as stores

MIB = 1 << 20
SIZES = {256 << 10: 256, MIB: 128, 4 * MIB: 48}
"""Blocks of a round, by their bytes."""
LAYOUT_ID = b"L" * 32
RAW = """
import ctypes, json, mmap, sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", sys.argv[1]) == 0
memory = mmap.mmap(-1, 64 << 20)
memory[:] = bytes(range(256)) * ((64 << 20) // 256)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert store.register_buffer(base, len(memory)) == 0
for line in sys.stdin:
    size, number, name = json.loads(line)
    slots = len(memory) // size
    began = time.perf_counter()
    for i in range(number):
        assert store.put_from(f"{name}/{i}", base + i % slots * size, size) == 0
    seconds = time.perf_counter() - began
    store.remove_by_regex(f"^{name}/.*", True)
    print(seconds, flush=True)
"""


@contextmanager
def raw_client(port: int) -> Iterator[subprocess.Popen[str]]:
    """The raw client, a process."""
    with subprocess.Popen(
        [sys.executable, "-c", RAW, f"127.0.0.1:{port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        process.kill()


def raw_put_s(client: subprocess.Popen[str], size: int, number: int) -> float:
    """Seconds for some puts of the raw client."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps([size, number, secrets.token_hex(4)]) + "\n")
    client.stdin.flush()
    for line in client.stdout:
        try:
            return float(line)
        except ValueError:
            continue  # The library prints too.
    raise AssertionError("the raw client has ended")


def blocks_of(size: int, number: int) -> list[tuple[BlockName, StoredBlock]]:
    """Blocks with their names."""
    data = random.Random(1).randbytes(size)
    found = []
    for _ in range(number):
        name = LAYOUT_ID, BlockKey(0, secrets.token_bytes(32))
        found.append((name, StoredBlock(memoryview(data), block_digest(*name, data))))
    return found


async def tier_put_s(
    tier: MooncakeTier, blocks: list[tuple[BlockName, StoredBlock]], written: asyncio.Event
) -> float:
    """Seconds until blocks are in the store; offered as fast as they are taken."""
    known, began_s = len(tier), time.perf_counter()
    for name, block in blocks:
        written.clear()
        while not tier.offer(name, block, lambda: None):
            await written.wait()
            written.clear()
    while len(tier) < known + len(blocks):
        written.clear()
        await written.wait()
    return time.perf_counter() - began_s


def seal_s(settings: MooncakeSettings, blocks: list[tuple[BlockName, StoredBlock]]) -> float:
    """Seconds to seal blocks, on one thread."""
    key = load_keys(settings.keys).sealing
    into = memoryview(bytearray(sealed_bytes_max(len(blocks[0][1].data))))
    began_s = time.perf_counter()
    for name, block in blocks:
        seal_block(key, name, block, "pool", into)
    return time.perf_counter() - began_s


def settings_of(port: int, place: Path) -> MooncakeSettings:
    """Settings of a tier, with a fresh key."""
    keys = place / "site.keys"
    keys.write_text(base64.b64encode(secrets.token_bytes(32)).decode())
    keys.chmod(0o600)
    return MooncakeSettings(("127.0.0.1", port), keys, "bench")


class Owner:
    """Notes that blocks were found."""

    def __init__(self, found: asyncio.Event) -> None:
        self._found, self.rules = found, KeepRules()

    def found_below(self, tier: LowerTier, names: Iterable[BlockName]) -> None:
        self._found.set()

    def gone_below(self, names: Iterable[BlockName]) -> None:
        pass


async def writes(rounds: int) -> None:
    """Compare writing."""
    groups = (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 4 * MIB),)
    rows = []
    with tempfile.TemporaryDirectory() as place, stores.running_store(segment_bytes=1 << 30) as st:
        settings = settings_of(st.port, Path(place))
        keys = load_keys(settings.keys)
        written = asyncio.Event()
        owner = Owner(written)
        tier = MooncakeTier(settings, keys, "pool", set(), PoolMetrics(), owner)
        tier.learn(Layout(LAYOUT_ID, 16, "0", groups))
        running = asyncio.create_task(tier.run())
        while not tier.client.is_ready:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
        with raw_client(st.port) as client:
            for size, number in SIZES.items():
                blocks = [blocks_of(size, number) for _ in range(rounds + 1)]
                times: list[tuple[float, float, float]] = []
                for each in blocks:
                    raw = await asyncio.to_thread(raw_put_s, client, size, number)
                    ours = await tier_put_s(tier, each, written)
                    times.append((raw, ours, seal_s(settings, each)))
                    await tier.drop(Scope("pool"))
                gigabytes = size * number / 1e9
                raw, ours, sealing = (statistics.median(t) for t in zip(*times[1:], strict=True))
                ratio = statistics.median(raw / ours for raw, ours, _ in times[1:])
                rows.append(
                    f"| {size >> 10} KiB x {number} | {gigabytes / raw:.2f} | "
                    f"{gigabytes / ours:.2f} | {ratio:.2f} | {gigabytes / sealing:.2f} |"
                )
        running.cancel()
        await asyncio.wait([running])
        await tier.close()
    print("| blocks | raw client, GB/s | tier, GB/s | tier / raw | sealing alone, GB/s |")
    print("|---|---|---|---|---|")
    print("\n".join(rows))


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["writes", "faults"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    if given.what == "writes":
        asyncio.run(writes(given.rounds))
    else:
        from benchmarks.pool.mooncake_faults import faults

        asyncio.run(faults(given.seconds))


if __name__ == "__main__":
    main()
