"""Rates of the codec of links on one core, by the CPU time of its thread.

    python -m benchmarks.link.codec_rates

Fragments of 64 to 512 KiB, from and to 64 MiB of memory, so that neither is in a cache.
"""

import time

import numpy as np

from prfaas.core.kv.blocks import Plane
from prfaas.pool.codec.exponent_window import coded_bytes_max, decode, encode

NUM_BYTES = 64 << 20
HEAD = 128
OUTLIERS = [3, 17, 90]
"""Channels of keys that are 60 times as large as others (KIVI, arXiv 2402.02750, figure 2)."""


def bfloat16(values: np.ndarray) -> memoryview:
    found = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return memoryview(found.tobytes())


def contents() -> dict[str, memoryview]:
    dice = np.random.default_rng(0)
    values = dice.standard_normal((NUM_BYTES // 2 // HEAD, HEAD), np.float32)
    keys = values.copy()
    keys[:, OUTLIERS] *= 60
    return {
        "normal": bfloat16(values),
        "normal, outlier channels": bfloat16(keys),
        "normal, scales of channels from 0.01 to 100": bfloat16(
            values * np.logspace(-2, 2, HEAD, dtype=np.float32)
        ),
        "noise": memoryview(dice.bytes(NUM_BYTES)),
    }


def measure(content: memoryview, fragment: int) -> tuple[float, float, float]:
    """Ratio, and GB/s of both ways."""
    into = memoryview(bytearray(NUM_BYTES))
    scratch, planes = (
        memoryview(bytearray(coded_bytes_max(fragment))),
        (Plane("bfloat16", fragment),),
    )
    encoding = decoding = coded_bytes = 0
    for start in range(0, NUM_BYTES, fragment):
        began = time.thread_time_ns()
        coded = encode(content[start : start + fragment], planes, scratch)
        encoding += time.thread_time_ns() - began
        coded_bytes += fragment if coded is None else len(coded)
        if coded is not None:
            began = time.thread_time_ns()
            decode(coded, into[start : start + fragment])
            decoding += time.thread_time_ns() - began
    assert not decoding or into == content
    return NUM_BYTES / coded_bytes, NUM_BYTES / encoding, NUM_BYTES / decoding if decoding else 0.0


def main() -> None:
    found = contents()
    print("| content | fragment | ratio | in, GB/s | out, GB/s |\n|---|---|---|---|---|")
    for name, content in found.items():
        for fragment in (64 << 10, 128 << 10, 512 << 10):
            runs = [measure(content, fragment) for _ in range(3)]
            ratio, coding, decoding = (max(column) for column in zip(*runs, strict=True))
            shown = f"{decoding:.1f}" if decoding else "-"
            print(f"| {name} | {fragment >> 10} KiB | {ratio:.3f} | {coding:.1f} | {shown} |")


if __name__ == "__main__":
    main()
