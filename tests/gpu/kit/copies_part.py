"""(b) Copies between device and pool memory: rates, bytes, and what they cost a decode beside them.

Pool memory is a shared file, as a pool node and an engine map it; pinned is what CUDA registered.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu.kit.results import Results

BLOCKS = (1 << 16, 1 << 18, 1 << 20, 1 << 23)
BYTES, BYTES_CPU = 1 << 30, 1 << 24
SKIP, FLIP, WRONG = "skipped copy", "flipped byte", "wrong description"


def run(results: Results) -> None:
    """Copy blocks out and back, pinned and not, alone and beside compute."""
    import torch

    is_gpu = results.device == "cuda"
    num_bytes = BYTES if is_gpu else BYTES_CPU
    cache = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=results.device)
    with pool_memory(num_bytes) as (region, address):
        for pinned in (False, True)[: 1 + is_gpu]:
            code = register(address, num_bytes) if pinned else 0
            if code:
                clear_error()
                results.skip(f"pinned copies: cudaHostRegister returned {code}")
                continue
            for block_bytes in BLOCKS:
                out_s, back_s = _round_trip(results, cache, region, block_bytes)
                results.add(
                    "copies",
                    pinned=pinned,
                    block_bytes=block_bytes,
                    to_host_gb_s=num_bytes / 1e9 / out_s,
                    to_device_gb_s=num_bytes / 1e9 / back_s,
                )
        if is_gpu:
            _beside(results, cache, region)
            _refused(results, cache, region, address)
            unregister(address)
        else:
            results.skip("hiding behind compute, and a refused cudaHostRegister: no GPU")
    _engine_copies(results)


@contextmanager
def pool_memory(num_bytes: int) -> Iterator[tuple[Any, int]]:
    """A shared file's memory as a tensor, and its address."""
    import torch

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(num_bytes)
        memory = mmap.mmap(file.fileno(), num_bytes)
        region = torch.frombuffer(memory, dtype=torch.uint8)
        region.zero_()
        yield region, region.data_ptr()


def register(address: int, num_bytes: int) -> int:
    """Pin memory for CUDA; the number of CUDA's error, 0 if it did or if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))


def unregister(address: int) -> None:
    """Undo `register`."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address)


def clear_error() -> None:
    """Have CUDA forget its last error, which PyTorch would take for that of its next call."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            ctypes.CDLL(line.split()[-1]).cudaGetLastError()
            return


def _round_trip(results: Results, cache: Any, region: Any, block_bytes: int) -> tuple[float, float]:
    """Seconds out and back; all bytes have to come back, in another order of blocks."""
    import torch

    num_blocks = cache.numel() // block_bytes
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_bytes))
    rows = (order * block_bytes).tolist()
    plan = [(at * block_bytes, row) for at, row in enumerate(rows)]
    back = torch.zeros_like(cache)
    region.zero_()
    out_s = _timed(lambda: _copy(cache, region, plan[results.damage == SKIP :], block_bytes))
    if results.damage == FLIP:
        region[rows[0]] ^= 1
    turned = [(row, at) for at, row in plan]
    if results.damage == WRONG:
        turned[0] = (turned[1][0], turned[0][1])
    back_s = _timed(lambda: _copy(region, back, turned, block_bytes))
    wrong = int((back != cache).view(num_blocks, -1).any(dim=1).sum())
    results.check(
        wrong == 0, f"{wrong} of {num_blocks} blocks of {block_bytes} bytes came back otherwise"
    )
    return out_s, back_s


def _copy(source: Any, target: Any, plan: list[tuple[int, int]], block_bytes: int) -> None:
    for at, to in plan:
        part = source[at : at + block_bytes]
        target[to : to + block_bytes].copy_(part, non_blocking=True)


def _timed(call: Callable[[], None]) -> float:
    """Seconds of the second of two calls, the device waited for."""
    for _ in range(2):
        _wait()
        began = time.perf_counter()
        call()
        _wait()
        seconds = time.perf_counter() - began
    return seconds


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _beside(results: Results, cache: Any, region: Any) -> None:
    """Pinned copies on a stream of their own beside compute: what is hidden, what it costs."""
    import torch

    size, block_bytes = 8192, 1 << 20
    weight = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    prompt = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    one = torch.randn(16, size, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    plan = [(at, at) for at in range(0, cache.numel(), block_bytes)]

    def copy() -> None:
        with torch.cuda.stream(side):
            _copy(cache, region, plan, block_bytes)

    copy_s = _timed(copy)
    for name, left, each in (("prefill", prompt, 24), ("decode", one, 400)):

        def compute(left: Any = left, each: int = each) -> None:
            for _ in range(each):
                torch.mm(left, weight)

        def both(compute: Callable[[], None] = compute) -> None:
            copy()
            compute()

        alone_s, both_s = _timed(compute), _timed(both)
        hidden = (alone_s + copy_s - both_s) / min(alone_s, copy_s)
        results.add(
            "beside",
            phase=name,
            copy_s=copy_s,
            compute_s=alone_s,
            both_s=both_s,
            hidden_ratio=hidden,
            slowdown=_share(compute, copy, alone_s),
        )


def _share(compute: Callable[[], None], copy: Callable[[], None], alone_s: float) -> float:
    """Time of the compute stream beside copies that outlast it, over its time alone."""
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _wait()
    copy()
    first.record()
    compute()
    last.record()
    copy()
    _wait()
    return float(first.elapsed_time(last) / 1e3 / alone_s)


def _refused(results: Results, cache: Any, region: Any, address: int) -> None:
    """Copies where CUDA refuses to pin: the number of its error, and that they go on."""
    code = register(address, cache.numel())  # A second time.
    clear_error()
    results.check(code != 0, "cudaHostRegister took memory that is registered already")
    unregister(address)
    out_s, back_s = _round_trip(results, cache, region, 1 << 20)
    results.add(
        "refused",
        code=code,
        to_host_gb_s=cache.numel() / 1e9 / out_s,
        to_device_gb_s=cache.numel() / 1e9 / back_s,
    )
    register(address, cache.numel())


def _engine_copies(results: Results) -> None:
    """vLLM's own offloading worker, with memory that it may pin and with memory that it may not."""
    try:
        from tests.gpu.kit import worker_copies
    except ImportError as missing:
        results.skip(f"copies of vLLM's offloading worker: {missing}")
        return
    for pins in (True, False):
        try:
            wrong, seconds, pinned = worker_copies.round_trip(pins=pins, damage=results.damage)
        except (AssertionError, NotImplementedError, ImportError) as problem:
            results.skip(f"copies of vLLM's offloading worker: {type(problem).__name__} {problem}")
            return
        results.add("worker", may_pin=pins, pinned=pinned, seconds=seconds, wrong_blocks=wrong)
        results.check(wrong == 0, f"vLLM's worker brought {wrong} blocks back otherwise")
