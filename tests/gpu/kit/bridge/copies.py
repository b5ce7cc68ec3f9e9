"""Copies between host and device memory by lists of addresses, in the order of a stream."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

LIBRARY = "KIT_COPY_LIBRARY"
"""Variable: path of the library built of `swap_blocks.cu`."""


def copy_batch(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy each range on PyTorch's current stream; on the host without a GPU.

    Args:
        sources: Addresses, int64, on the host, like the others.
        targets: Addresses.
        sizes: Bytes of each.

    Raises:
        RuntimeError: CUDA refuses a copy; its number is in the text.
    """
    if not torch.cuda.is_available():
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)
        return
    stream = torch.cuda.current_stream().cuda_stream
    library = _library()
    if library is not None:
        failed = library.kit_copy_batch(
            ctypes.c_void_p(sources.data_ptr()),
            ctypes.c_void_p(targets.data_ptr()),
            ctypes.c_void_p(sizes.data_ptr()),
            ctypes.c_long(sources.numel()),
            ctypes.c_void_p(stream),
        )
        if failed:
            raise RuntimeError(f"cudaMemcpyAsync returned {failed}")
        return
    from cuda.bindings import runtime

    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        (error,) = runtime.cudaMemcpyAsync(target, source, size, kind, stream)
        if error != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaMemcpyAsync returned {error}")


_loaded: dict[str, Any] = {}


def _library() -> Any:
    path = os.environ.get(LIBRARY, "")
    if path and path not in _loaded:
        _loaded[path] = ctypes.CDLL(path)
    return _loaded.get(path)
