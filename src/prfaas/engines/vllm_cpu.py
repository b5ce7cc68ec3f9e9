"""vLLM's tiering on machines without a GPU.

vLLM's own spec refuses the CPU platform because its worker copies with CUDA streams. Here the KV
cache is host memory already, so a copy is a `memmove` between it and the shared region; the block
arithmetic is vLLM's own.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from prfaas.engines.vllm_compat import engine_id

Blocks = npt.NDArray[np.int32]

DENSE_S, SPIN_S, SPIN_RATIO = 0.008, 0.002, 2.0
"""Messages that follow each other within `DENSE_S` are those of decode steps. Between them a
process polls: for so many times as long as the last pause was, at least for `SPIN_S`. Otherwise it
sleeps. Steps that wait for blocks are 10 ms apart. vLLM polls for a second after each message."""
SLEEP_RATIO = 0.25
"""Longest sleep as a share of the time since the last message. A notification that follows another
within a millisecond may be lost, since vLLM's publishers queue a single one."""


def sleep_when_idle() -> None:
    """Make the readers of vLLM's message queues in this process sleep until they are notified.

    vLLM's CPU workers poll for a second after every step, on the core they are bound to. Where an
    engine has that core alone this gains microseconds; here engines, pool nodes and the gateway
    share it. Queues that exist already are changed as well.
    """
    if SpinCondition.wait is not _wait_asleep:
        SpinCondition.wait = _wait_asleep


_wait = SpinCondition.wait


def _wait_asleep(self: Any, timeout_ms: int | None = None) -> None:
    last_read, before = self.last_read, getattr(self, "read_before", (0.0, 0.0))
    if last_read != before[1]:
        before = self.read_before = before[1], last_read
    pause_s = before[1] - before[0]
    idle_s = time.monotonic() - last_read
    limit_ms = max(1, int(idle_s * SLEEP_RATIO * 1000))
    self.busy_loop_s = 0.0 if pause_s > DENSE_S else max(SPIN_S, SPIN_RATIO * pause_s)
    _wait(self, limit_ms if timeout_ms is None else min(limit_ms, timeout_ms))


def keep_seeds() -> None:
    """Have this worker serve requests with a `seed` whose prompt is prefilled in several steps.

    vLLM samples a token after every step of prefill and discards all but the last. It then sets
    the generator of a seeded request back by an offset, which PyTorch's generators for CPUs do not
    have, and the first such request would end the engine.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    vllm_sample = GPUModelRunner.sample_tokens
    if getattr(vllm_sample, "keeps_seeds", False):
        return

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        """Draw tokens that are discarded without the generators of their requests, which stay as
        the last step of prefill needs them."""
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        generators = self.input_batch.generators
        kept = {at: generators.pop(at) for at in discarded.tolist() if at in generators}
        try:
            return vllm_sample(self, grammar_output)
        finally:
            generators.update(kept)

    sample_tokens.keeps_seeds = True  # type: ignore[attr-defined]
    GPUModelRunner.sample_tokens = sample_tokens


class CpuPlatformSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with a worker that copies by `memmove`."""

    _memmove_worker: MemmoveWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank."""
        if self._memmove_worker is None:
            region = SharedOffloadRegion(
                engine_id=engine_id(self),
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._memmove_worker = MemmoveWorker(kv_caches, self.blocks_per_chunk, region)
        return self._memmove_worker


class MemmoveWorker(OffloadingWorker):
    """Copies blocks between the KV cache and the shared region, synchronously."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self.region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._cache_tensors: list[Any] = []
        self._host_tensors: list[Any] = []
        for cache in kv_caches.tensors:
            self._cache_tensors.append(cache.tensor)
            page = cache.page_size_bytes
            self._host_tensors.append(region.create_next_worker_view(page * blocks_per_chunk))
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """KV cache to shared region."""
        num_bytes = 0
        for cache, host, size in self._copies(src_spec, dst_spec):
            for source, target in zip(cache.tolist(), host.tolist(), strict=True):
                ctypes.memmove(target, source, size)
            num_bytes += size * len(cache)
        return self._done(job_id, num_bytes)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Shared region to KV cache; every load is done at once, `expedited` (vLLM 0.33) or not."""
        num_bytes = 0
        for cache, host, size in self._copies(dst_spec, src_spec):
            for source, target in zip(host.tolist(), cache.tolist(), strict=True):
                ctypes.memmove(target, source, size)
            num_bytes += size * len(cache)
        return self._done(job_id, num_bytes)

    def get_finished(self) -> list[TransferResult]:
        """Jobs finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """No operation: every job ends when it is submitted."""

    def shutdown(self) -> None:
        """Release the shared region."""
        self._host_tensors.clear()
        self._cache_tensors.clear()
        self.region.cleanup()

    def _done(self, job_id: int, num_bytes: int) -> bool:
        self._finished.append(TransferResult(job_id, True, transfer_size=num_bytes))
        return True

    def _copies(
        self, cache_spec: GPULoadStoreSpec, host_spec: Any
    ) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int]]:
        """Addresses in the KV cache, addresses in the shared region, and bytes at each."""
        host_ids: Blocks = host_spec.block_ids
        cache_at = host_at = 0
        groups = zip(self._refs, cache_spec.group_sizes, cache_spec.block_indices, strict=True)
        for refs, group_size, first_block in groups:
            skip = first_block % self._blocks_per_chunk
            num_chunks = -(-(group_size + skip) // self._blocks_per_chunk)
            cache_ids = cache_spec.block_ids[cache_at : cache_at + group_size]
            chunk_ids = host_ids[host_at : host_at + num_chunks]
            cache_at += group_size
            host_at += num_chunks
            if group_size:
                yield from self._group_copies(refs, cache_ids, chunk_ids, skip)

    def _group_copies(
        self, refs: Sequence[Any], cache_ids: Blocks, chunk_ids: Blocks, skip: int
    ) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int]]:
        for ref in refs:
            cache = np.empty(len(cache_ids), dtype=np.uint64)
            host = np.empty(len(cache_ids), dtype=np.uint64)
            compute_sub_block_ptrs(cache_ids, 1, cache, self._cache_tensors[ref.tensor_idx])
            compute_sub_block_ptrs(
                chunk_ids, self._blocks_per_chunk, host, self._host_tensors[ref.tensor_idx], skip
            )
            yield cache, host, ref.page_size_bytes
