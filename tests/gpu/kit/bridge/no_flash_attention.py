"""Stands in for `vllm.vllm_flash_attn`, whose kernels are not in the kit: no version is there."""

from __future__ import annotations

from typing import Any

FA2_AVAILABLE = FA3_AVAILABLE = False


def fa_version_unsupported_reason(version: int, device: Any = None) -> str:
    return "the kit has no FlashAttention"


def is_fa_version_supported(version: int, device: Any = None) -> bool:
    return False


def _missing(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the kit has no FlashAttention; use the backend TRITON_ATTN")


flash_attn_varlen_func = get_scheduler_metadata = _missing
compile_flash_attn_varlen_func_from_specs = None
