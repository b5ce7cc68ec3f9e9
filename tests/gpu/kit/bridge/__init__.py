"""Bridge by which vLLM's Python tree starts beside PyTorch 2.11 without compiled kernels.

Part of the kit, never of the product. vLLM finds the package by its entry point for platforms,
which it loads before it chooses one. From then on

- the compiled modules that vLLM imports by name are those of `_STANDS_IN`;
- with `KIT_KERNEL_BLOCK` Triton's attention splits pages;
- with `KIT_DRY_DEVICE=1` the platform is a GPU that is not there (`dry_device.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

DRY, KERNEL_BLOCK = "KIT_DRY_DEVICE", "KIT_KERNEL_BLOCK"
_HERE = Path(__file__).parent
_STANDS_IN = {
    "vllm._C_stable_libtorch": "copy_ops.py",
    "vllm.vllm_flash_attn": "no_flash_attention.py",
    "vllm.vllm_flash_attn.flash_attn_interface": "no_flash_attention.py",
}


class _Finder:
    """Finder of the modules that stand in for compiled ones."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = _STANDS_IN.get(name)
        if file is None:
            return None
        place = _HERE / file
        is_package = any(each.startswith(f"{name}.") for each in _STANDS_IN)
        return spec_from_file_location(
            name,
            place,
            loader=SourceFileLoader(name, str(place)),
            submodule_search_locations=[str(_HERE)] if is_package else None,
        )


def install() -> None:
    """Let the modules that stand in be found, once a process."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def platform() -> str | None:
    """Return the platform class for vLLM; None leaves the choice to vLLM, which sees the GPU."""
    return "kit_bridge.dry_device.DryPlatform" if os.environ.get(DRY) == "1" else None


def kernel_blocks() -> None:
    """Have Triton's attention read pages in blocks of `KIT_KERNEL_BLOCK` tokens.

    The backends that do so of themselves, FlashInfer and FlashAttention 4, are not in the kit.
    """
    tokens = int(os.environ.get(KERNEL_BLOCK) or 0)
    if tokens:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        TritonAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
            lambda kv_cache_spec=None: [tokens]
        )


install()
