"""Cost of sealing for the writer of the disk tier: rates and CPU time, sealed and in the clear.

    python -m benchmarks.pool.disk_sealing [FOLDER]

Both kinds alternate, each round in a new folder, with segments that are synchronised as a pool node
does it. The cost of sealing alone is timed on the same blocks in the same run.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.keys.keyring import Keyring
from prfaas.pool.keys.record_seals import RecordSeals, SegmentStamps
from prfaas.pool.keys.site_keys import KeyRing, SiteKey
from prfaas.pool.keys.wrapping import SiteKeyWrapper
from prfaas.pool.store.disk_segments import SegmentFiles

BLOCK_BYTES, BLOCKS, SEGMENTS, ROUNDS = 2 << 20, 32, 4, 7
ORIGIN = Origin(frozenset(), "engine", b"", "a" * 32)


def site() -> SiteKeyWrapper:
    key = SiteKey(bytes(32))
    return SiteKeyWrapper(KeyRing(key, {key.id: key}))


def write(folder: Path, data: bytearray, wrapper: SiteKeyWrapper | None) -> tuple[float, float]:
    """Write all segments; elapsed and CPU seconds."""
    files = SegmentFiles(folder, wrapper=wrapper)
    began, cpu = time.perf_counter(), time.thread_time()
    for segment in range(SEGMENTS):
        number = files.start()
        for block in range(BLOCKS):
            key = BlockKey(0, (segment * BLOCKS + block).to_bytes(32, "big"))
            files.append(number, (bytes(32), key), data, bytes(32), ORIGIN)
        files.seal()
    times = time.perf_counter() - began, time.thread_time() - cpu
    files.close()
    shutil.rmtree(folder)
    return times


def seal(folder: Path, data: bytearray) -> float:
    """CPU seconds of sealing as many blocks."""
    keyring = Keyring(folder / "keyring", site())
    seals, stamps = RecordSeals(keyring), SegmentStamps(keyring)
    cpu = time.thread_time()
    for _ in range(BLOCKS * SEGMENTS):
        seals.close(stamps.stamp(ORIGIN.tenant), data, bytes(300))
    return time.thread_time() - cpu


def main() -> None:
    parent = sys.argv[1] if len(sys.argv) > 1 else None
    data = bytearray(os.urandom(BLOCK_BYTES))
    gigabytes = BLOCK_BYTES * BLOCKS * SEGMENTS / 1e9
    plain, sealed, alone = [], [], []
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        for number in range(ROUNDS + 1):
            plain.append(write(folder / f"p{number}", data, None))
            sealed.append(write(folder / f"s{number}", data, site()))
            alone.append(seal(folder, data))
    print("| | GB/s | CPU s a GB |\n|---|---|---|")
    for kind, times in (("in the clear", plain[1:]), ("sealed", sealed[1:])):
        rate = gigabytes / statistics.median(elapsed for elapsed, _ in times)
        cpu = statistics.median(cpu for _, cpu in times) / gigabytes
        print(f"| {kind} | {rate:.2f} | {cpu:.3f} |")
    ratios = [clear / closed for (clear, _), (closed, _) in zip(plain[1:], sealed[1:], strict=True)]
    print(f"\nrate sealed to in the clear, by round: {', '.join(f'{r:.2f}' for r in ratios)}")
    share = statistics.median(
        cost / elapsed for cost, (elapsed, _) in zip(alone[1:], plain[1:], strict=True)
    )
    print(f"CPU time of sealing alone: {share:.1%} of the time of a write in the clear")


if __name__ == "__main__":
    main()
