"""The Python tree of an SGLang release, imported without its kernels.

PyPI has SGLang for CUDA only, and CI does not download it. Who has unpacked the wheel names the
directory that holds `sglang/` in PRFAAS_SGLANG_TREE:

    pip download --no-deps -d /tmp/sglang sglang==0.5.23
    unzip -q /tmp/sglang/sglang-0.5.23-*.whl -d /tmp/sglang/tree
    PRFAAS_SGLANG_TREE=/tmp/sglang/tree pytest -rs tests/engines/sglang
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

VARIABLE = "PRFAAS_SGLANG_TREE"
TREE = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
needs_tree = pytest.mark.skipif(
    TREE is None, reason=f"{VARIABLE} names no unpacked SGLang wheel (tests/engines/sglang/tree.py)"
)
_PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.cpp_utils")


def open_tree(tree: Path) -> None:
    """Make SGLang's modules importable without its packages' own imports, which need a GPU."""
    for name in _PACKAGES:
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(tree.joinpath(*name.split(".")))]
            sys.modules[name] = package
