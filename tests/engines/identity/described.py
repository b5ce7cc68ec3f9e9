"""Prints what `describe` makes of engines, as JSON; nothing is loaded and nothing runs.

Run as a program: vLLM keeps process-wide state that tests must not share. Layers are built on the
`meta` device, cache groups and layout are resolved by vLLM's own code, as `EngineCore` does it.

    python described.py '[{"model": DIRECTORY, "args": [...], "layout": "HND"}, ...]'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

TRANSFER: dict[str, Any] = {
    "kv_connector": "PrfaasConnector",
    "kv_connector_module_path": "prfaas.engines.vllm_connector",
    "kv_role": "kv_both",
    "engine_id": "described",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 2**28,
        "prfaas_engine": "e",
        "prfaas_pool": "/nowhere",
    },
}
ALWAYS = ["--prefix-caching-hash-algo", "sha256_cbor", "--enforce-eager"]
# By itself vLLM selects the type of recurrent state by the instructions that the CPU has.
ALWAYS += ["--mamba-ssm-cache-dtype", "float32"]


def _config(model: str, args: list[str], tokens: int | None) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    transfer = TRANSFER
    if tokens is not None:
        extra = TRANSFER["kv_connector_extra_config"]
        transfer = TRANSFER | {
            "kv_connector_extra_config": {**extra, "prfaas_block_tokens": tokens}
        }
    said = parser.parse_args(
        ["--model", model, *ALWAYS, "--kv-transfer-config", json.dumps(transfer), *args]
    )
    return EngineArgs.from_cli_args(said).create_engine_config()


def describe_engine(
    model: str, args: list[str], layout: str | None, tokens: int | None
) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import record_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_configs,
    )

    from prfaas.engines.canonical.vllm_ranks import set_chunk
    from prfaas.engines.vllm_layout import describe

    config = _config(model, args, tokens)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        layers = config.compilation_config.static_forward_context
        specs = {
            name: spec
            for name, layer in layers.items()
            if hasattr(layer, "get_kv_cache_spec") and (spec := layer.get_kv_cache_spec(config))
        }
        layers.clear()
        record_kv_cache_layout(config.cache_config, layout or "HND")
        found = get_kv_cache_configs(config, [specs], [2**30])
        caches = generate_scheduler_kv_cache_config(found)
        set_chunk(config, caches)
        row = describe(config, caches)
    planes = {group.index: group.planes for group in row.layout.groups}
    return {
        "id": row.layout.layout_id.hex(),
        "facts": row.facts,
        "model": row.model,
        "planes": planes,
    }


def main(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = []
    for each in asked:
        try:
            with patch.dict(os.environ, each.get("env", {})):
                answers.append(
                    describe_engine(
                        each["model"], each.get("args", []), each.get("layout"), each.get("tokens")
                    )
                )
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    return answers


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
