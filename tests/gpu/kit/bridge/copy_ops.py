"""Stands in for `vllm._C_stable_libtorch`: the copies that the offloading worker asks for.

They are CUDA's own copies (`swap_blocks.cu`, or `cuda-bindings` where there is no compiler), and
`memmove` for a GPU that is not there. The other operations are those that dense and gated-delta-net
models ask for by name, in PyTorch: they are correct and slow.
"""

from __future__ import annotations

import torch
from kit_bridge.copies import copy_batch

_copies = torch.library.Library("_C_cache_ops", "FRAGMENT")
_copies.define(
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, "
    "bool is_src_access_order_any=False) -> ()"
)
_copies.define(
    "swap_blocks(Tensor src, Tensor! dst, int block_size_in_bytes, Tensor block_mapping) -> ()"
)


def _batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool = False
) -> None:
    copy_batch(sources, targets, sizes)


def _blocks(
    source: torch.Tensor, target: torch.Tensor, block_bytes: int, mapping: torch.Tensor
) -> None:
    sources = source.data_ptr() + mapping[:, 0].contiguous() * block_bytes
    targets = target.data_ptr() + mapping[:, 1].contiguous() * block_bytes
    copy_batch(sources, targets, torch.full_like(sources, block_bytes))


_copies.impl("swap_blocks_batch", _batch, "CompositeExplicitAutograd")
_copies.impl("swap_blocks", _blocks, "CompositeExplicitAutograd")

_layers = torch.library.Library("_C", "FRAGMENT")
_layers.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
_layers.define("rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()")
_layers.define(
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()"
)


def _silu_and_mul(out: torch.Tensor, values: torch.Tensor) -> None:
    gate, up = values.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _rms_norm(
    out: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    wide = values.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    normal = wide.to(values.dtype)
    out.copy_(normal if weight is None else normal * weight)


def _fused_add_rms_norm(
    values: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    residual.add_(values)
    _rms_norm(values, residual, weight, epsilon)


_layers.impl("silu_and_mul", _silu_and_mul, "CompositeExplicitAutograd")
_layers.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
_layers.impl("fused_add_rms_norm", _fused_add_rms_norm, "CompositeExplicitAutograd")

for _name in (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
):
    _layers.define(f"{_name}(int capability) -> bool")
    _layers.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
