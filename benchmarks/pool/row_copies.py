"""Copies between rows of several ranks and blocks: what converting costs beside a plain copy.

    python -m benchmarks.pool.row_copies

Reads a block of 32 layers and 16 tokens out of a row in shared memory, the best of 40 times, and
prints the rate as a share of that of one rank, where a row has the bytes of the block in one piece.
"""

from __future__ import annotations

import os
import time

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.engine.engine_memory import PLACES_MAX
from tests.core.kv.canonical.model_kinds import Site, attention
from tests.pool.engine_rows import memory

NUM_LAYERS, TOKENS, CELL_BYTES, NUM_TIMES = 32, 16, 512, 40
"""Of one token and head: K and V of 128 numbers in bfloat16."""


def measured(heads: int, tp_size: int, *, by_token: bool) -> tuple[float, int, int]:
    """Bytes a second, system calls and places of one block."""
    layers = [attention(heads, TOKENS, CELL_BYTES, by_token=by_token, dtype="bfloat16")]
    layers *= NUM_LAYERS
    with memory(Site(tp_size, (tuple(range(NUM_LAYERS)),), 0), layers) as (rows, file, row_bytes):
        os.pwrite(file, os.urandom(row_bytes), 0)
        key = BlockKey(0, bytes(32))
        buffer = memoryview(bytearray(rows.block_bytes(0)))
        best_s = float("inf")
        for _ in range(NUM_TIMES):
            began = time.perf_counter()
            rows.read(key, 0, buffer)
            best_s = min(best_s, time.perf_counter() - began)
        places = [len(piece.places) for piece in rows.pieces(0).reads]
        num_calls = sum(-(-number // PLACES_MAX) for number in places)
        return len(buffer) / best_s, num_calls, sum(places)


def main() -> None:
    print("| order in the cache | KV heads | ranks | rate | system calls | places |")
    print("|---|---|---|---|---|---|")
    for name, by_token in (("head-major (LBHNC)", False), ("token-major (LBNHC)", True)):
        whole, _, _ = measured(8, 1, by_token=by_token)
        for heads, tp_size in ((8, 1), (8, 2), (8, 4), (8, 8), (2, 8)):
            rate, calls, places = measured(heads, tp_size, by_token=by_token)
            print(f"| {name} | {heads} | {tp_size} | {rate / whole:.2f} | {calls} | {places} |")


if __name__ == "__main__":
    main()
