"""vLLM's own modules, for tests that compare with them; skipped where vLLM is not installed."""

import importlib
import warnings
from typing import Any

import pytest


def needing_vllm(name: str) -> Any:
    """A module of vLLM; it needs to import, not to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed here")
        return importlib.import_module(name)
