"""Blocks through vLLM's own offloading worker: a device cache, a shared region, and back.

On a GPU it is the worker of an engine, with asynchronous copies. Elsewhere it is that of the GPU
that is not there (the kit's bridge), or prfaas' worker for CPUs.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from prfaas.engines.vllm_cpu import MemmoveWorker

NUM_BLOCKS, PAGE_BYTES, NUM_LAYERS = 64, 65_536, 4


def round_trip(*, pins: bool, damage: str = "") -> tuple[int, float, bool]:
    """Store all blocks, empty the cache, load them in another order.

    Args:
        pins: False has `cudaHostRegister` refuse.
        damage: "flipped byte", "wrong description" or "skipped copy".

    Returns:
        Blocks that are not as they were, seconds of both ways, and if the region was pinned.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [
        torch.randint(-128, 127, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8, device=device)
        for _ in range(NUM_LAYERS)
    ]
    caches = CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(tensor=each, page_size_bytes=PAGE_BYTES) for each in tensors
        ],
        group_data_refs=[
            [
                CanonicalKVCacheRef(tensor_idx=number, page_size_bytes=PAGE_BYTES)
                for number in range(NUM_LAYERS)
            ]
        ],
    )
    region = SharedOffloadRegion(
        engine_id=f"gpu-kit-{os.getpid()}-{pins}",
        num_chunks=NUM_BLOCKS,
        rank=0,
        kv_bytes_per_chunk=PAGE_BYTES * NUM_LAYERS,
        cpu_page_size=PAGE_BYTES * NUM_LAYERS,
    )
    worker = None
    try:
        worker = _worker(caches, region, pins)
        before = [each.clone() for each in tensors]
        blocks = np.arange(NUM_BLOCKS, dtype=np.int32)
        rows = np.random.default_rng(1).permutation(blocks)
        took = int(damage == "skipped copy")
        began = time.perf_counter()
        device_blocks = GPULoadStoreSpec(
            blocks[took:], group_sizes=[NUM_BLOCKS - took], block_indices=[took]
        )
        worker.submit_store(1, device_blocks, CPULoadStoreSpec(rows[took:]))
        _finish(worker, 1)
        for each in tensors:
            each.zero_()
        if damage == "flipped byte":
            _flip(region)
        if damage == "wrong description":
            rows = rows[::-1].copy()
        target = GPULoadStoreSpec(blocks, group_sizes=[NUM_BLOCKS], block_indices=[0])
        worker.submit_load(2, CPULoadStoreSpec(rows), target)
        _finish(worker, 2)
        seconds = time.perf_counter() - began
        wrong = torch.zeros(NUM_BLOCKS, dtype=torch.bool, device=device)
        for was, each in zip(before, tensors, strict=True):
            wrong |= (was != each).any(dim=1)
        return int(wrong.sum()), seconds, bool(getattr(region, "is_pinned", False))
    finally:
        if worker is not None:
            worker.shutdown()
        region.cleanup()


def _worker(caches: Any, region: Any, pins: bool) -> Any:
    if current_platform.is_cpu():
        return MemmoveWorker(caches, 1, region)
    registers = gpu_worker.host_register
    if not pins:
        gpu_worker.host_register = lambda address, num_bytes: False
    try:
        return gpu_worker.CPUOffloadingWorker(caches, 1, NUM_BLOCKS, mmap_region=region)
    finally:
        gpu_worker.host_register = registers


def _finish(worker: Any, job: int) -> None:
    """Wait for a job, which has to be reported as done."""
    worker.wait({job})
    done = {result.job_id: result.success for result in worker.get_finished()}
    if done != {job: True}:
        raise RuntimeError(f"job {job} ended as {done}")


def _flip(region: Any) -> None:
    region._base[0] ^= 1
