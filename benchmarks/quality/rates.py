"""Rates and errors of rounded blocks on one core: python -m benchmarks.quality.rates

Blocks of 2 MiB, of 64 tokens, from and to 64 MiB of memory that has its pages, as that of a node in
use has; CPU time of the thread. The sender codes, decodes again and hashes; the receiver decodes
and hashes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import blake3
import numpy as np

from benchmarks.link.codec_rates import NUM_BYTES, contents
from prfaas.core.codec.codecs import CodedSegment, Form, SegmentMode
from prfaas.pool.codec.rounding import restore_block, round_block

BLOCK = 2 << 20
FORMS = {
    "fp8": CodedSegment(SegmentMode.FP8, (BLOCK // 2, 0, 0, 0)),
    "kivi4, heads first": CodedSegment(SegmentMode.KIVI4, (64, 8, 128, 128), 8),
    "kivi4, tokens first": CodedSegment(
        SegmentMode.KIVI4, (64, 8, 128, 128), 8, is_token_major=True
    ),
    "float32 as bfloat16": CodedSegment(SegmentMode.STATE, (BLOCK // 4, 0, 0, 0)),
}
NAMES = ("normal", "normal, outlier channels")


def numbers(data: memoryview) -> np.ndarray:
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def seconds(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e9


def measure(form: Form, content: memoryview) -> tuple[float, float, float]:
    """GB/s at the sender and at the receiver, and the error by the size of the numbers."""
    back, room = memoryview(bytearray(b"\1") * NUM_BYTES), memoryview(bytearray(BLOCK))
    sending = receiving = 0.0
    for at in range(0, NUM_BYTES, BLOCK):
        streams: list[bytearray] = []

        def send(at: int = at, streams: list[bytearray] = streams) -> None:
            streams.append(round_block(form, content[at : at + BLOCK], room))
            blake3.blake3(room).digest()

        def receive(at: int = at, streams: list[bytearray] = streams) -> None:
            into = back[at : at + BLOCK]
            restore_block(memoryview(streams[0]), into)
            blake3.blake3(into).digest()

        sending += seconds(send)
        receiving += seconds(receive)
    kind = (lambda data: np.frombuffer(data, np.float32)) if _is_state(form) else numbers
    old, new = kind(content), kind(back)
    error = float(np.sqrt(np.square(new - old).mean() / np.square(old).mean()))
    return NUM_BYTES / sending / 1e9, NUM_BYTES / receiving / 1e9, error


def _is_state(form: Form) -> bool:
    return form.modes == {SegmentMode.STATE}


def main() -> None:
    every = contents()
    normal = np.random.default_rng(0).standard_normal(NUM_BYTES // 4).astype(np.float32)
    print("| form | content | ratio | sender, GB/s | receiver, GB/s | error |")
    print("|---|---|---|---|---|---|")
    for name, segment in FORMS.items():
        form = Form((segment,))
        for content in NAMES if not _is_state(form) else NAMES[:1]:
            data = memoryview(normal.tobytes()) if _is_state(form) else every[content]
            runs = [measure(form, data) for _ in range(3)]
            sender, receiver, error = (max(column) for column in zip(*runs, strict=True))
            ratio = form.decoded_bytes / form.coded_bytes
            rates = f"{sender:.1f} | {receiver:.1f} | {error:.2%}"
            print(f"| {name} | {content} | {ratio:.2f} | {rates} |")


if __name__ == "__main__":
    main()
