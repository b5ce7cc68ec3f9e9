"""Prints the KV cache specs that vLLM's own model classes declare, as JSON.

Run as a program: vLLM keeps process-wide state that tests must not share. The models are built on
the `meta` device, so no weights exist and no engine starts.

    python vllm_specs.py CONFIG_DIR...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def _vllm_config(directory: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
    ).create_engine_config()


def layer_specs(directory: str) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    config = _vllm_config(directory)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        layers = config.compilation_config.static_forward_context
        specs = [
            layer.get_kv_cache_spec(config)
            for layer in layers.values()
            if hasattr(layer, "get_kv_cache_spec")
        ]
        state_dtype = config.cache_config.mamba_ssm_cache_dtype
        layers.clear()
    return {
        "block_size": config.cache_config.block_size,
        "state_dtype": state_dtype,
        "layers": [
            {
                "spec": type(spec).__name__,
                "window": getattr(spec, "sliding_window", None),
                "unpadded": spec.real_page_size_bytes,
                "page": spec.page_size_bytes,
            }
            for spec in specs
            if spec is not None
        ],
    }


if __name__ == "__main__":
    print(json.dumps({directory: layer_specs(directory) for directory in sys.argv[1:]}))
