"""(e) The exponent window on the device: the stream of the CPU's kernel, exactly, and its rate.

Without a GPU, Triton interprets the kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tests.gpu.kit.results import Results

BYTES, BYTES_CPU = 1 << 28, 1 << 16
SPREADS = ("normal", "wide", "escapes everywhere", "infinities")


def samples(num_values: int, spread: str) -> Any:
    """Return bf16 values as their 16 bits, int16.

    Args:
        num_values: An even number.
        spread: "normal" shrinks to about three quarters; "wide" has escapes; in "escapes
            everywhere" chunks stay raw; "infinities" has them and NaNs.
    """
    import torch

    draws = torch.Generator().manual_seed(SPREADS.index(spread))
    if spread == "escapes everywhere":
        return torch.randint(-(2**15), 2**15, (num_values,), generator=draws, dtype=torch.int16)
    values = torch.randn(num_values, generator=draws)
    if spread == "wide":
        values = values * torch.exp2(torch.randint(-16, 2, (num_values,), generator=draws).float())
    values = values.to(torch.bfloat16)
    if spread == "infinities":
        values[::977] = float("inf")
        values[1::1951] = float("nan")
    return values.view(torch.int16)


def run(results: Results) -> None:
    """Code and decode on the device and on the CPU, and compare every byte."""
    if results.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from tests.gpu.kit import window_kernels

    num_bytes = BYTES if results.device == "cuda" else BYTES_CPU
    for spread in SPREADS:
        for num_values in (num_bytes // 2, 2 * 8192 + 130):
            values = samples(num_values, spread)
            expected, cpu_in, cpu_out = _on_cpu(values)
            here = values.to(results.device)
            coded, starts = window_kernels.encode(here)
            if results.damage == "flipped byte":
                coded[coded.numel() // 2] ^= 1
            back = window_kernels.decode(coded, starts, num_values)
            same = torch.equal(coded.cpu(), expected)
            results.check(same, f"{spread}, {num_values} values: another stream than the CPU's")
            exact = torch.equal(back.cpu(), values)
            results.check(exact, f"{spread}, {num_values} values: decoded to other values")
            walked = window_kernels.chunk_starts(expected.numpy())
            results.check(walked == starts.tolist(), f"{spread}: chunks lie elsewhere")
            if num_values == num_bytes // 2:
                rates = _rates(results.device, values, here, coded, starts, window_kernels)
                results.add(
                    "codec",
                    spread=spread,
                    num_bytes=2 * num_values,
                    ratio=2 * num_values / coded.numel(),
                    cpu_in_gb_s=cpu_in,
                    cpu_out_gb_s=cpu_out,
                    exact=same and exact,
                    **rates,
                )


def _on_cpu(values: Any) -> tuple[Any, float, float]:
    """The stream of the CPU's kernel, and its rates of coding and decoding, GB/s, one core."""
    import numpy as np
    import torch

    from prfaas.pool.codec import kernels
    from prfaas.pool.codec.exponent_window import coded_bytes_max

    words = values.numpy().view(np.uint16)
    into = np.empty(coded_bytes_max(words.nbytes), np.uint8)
    back = np.empty(words.nbytes, np.uint8)
    began = time.perf_counter()
    size = kernels.encode_window(words, words.view(np.uint8), into)
    coded_at = time.perf_counter()
    kernels.decode_window(into[:size], back, back.view(np.uint16))
    done_at = time.perf_counter()
    stream = torch.from_numpy(into[:size].copy())
    per = words.nbytes / 1e9
    return stream, per / (coded_at - began), per / (done_at - coded_at)


def _rates(
    device: str, values: Any, here: Any, coded: Any, starts: Any, kernels: Any
) -> dict[str, float]:
    if device != "cuda":
        return {}
    per = values.numel() * 2 / 1e9
    return {
        "gpu_in_gb_s": per / _seconds(lambda: kernels.encode(here)),
        "gpu_out_gb_s": per / _seconds(lambda: kernels.decode(coded, starts, here.numel())),
    }


def _seconds(call: Callable[[], object]) -> float:
    """Median of ten, after three that are not counted."""
    import torch

    found = list[float]()
    for number in range(13):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        if number >= 3:
            found.append(first.elapsed_time(last) / 1e3)
    return sorted(found)[len(found) // 2]
