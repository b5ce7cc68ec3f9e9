"""A dry run of the kit without a GPU or a network: `python3 start.py --dry` (Python 3.12).

    unshare -n sh -c 'ip link set lo up && python3 gpu-kit/start.py --dry'

vLLM's CUDA path runs on a GPU that is not there: imports, configuration, kernels compiled for it,
the connector, its descriptions of blocks, and the copies of the offloading worker, which are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.gpu.kit import models

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.gdn_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_5",
    "prfaas.engines.vllm_connector",
    "prfaas.gateway.app",
    "prfaas.pool.node.node",
    "prfaas.cli.main",
    "tests.gpu.kit.engines_part",
    "tests.gpu.kit.copies_part",
    "tests.gpu.kit.layers_part",
    "tests.gpu.kit.ttft_part",
    "tests.gpu.kit.codec_part",
    "tests.gpu.kit.window_kernels",
)
ENV = {
    "KIT_DRY_DEVICE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
}
PROMPT_TOKENS, HANDED_TOKENS = 1_100, 2_300


def versions() -> str:
    """Import everything, and name the versions."""
    from importlib import import_module

    import torch
    import triton
    import vllm

    for name in MODULES:
        import_module(name)
    return (
        f"imports: {len(MODULES)} modules; Python {platform.python_version()}, torch "
        f"{torch.__version__}, triton {triton.__version__}, vLLM {vllm.__version__}"
    )


def copies() -> str:
    """Copy blocks by vLLM's own offloading worker."""
    import kit_bridge.dry_worker  # noqa: F401

    from tests.gpu.kit.worker_copies import NUM_BLOCKS, NUM_LAYERS, round_trip

    wrong, _, _ = round_trip(pins=False)
    broken, _, _ = round_trip(pins=False, damage="flipped byte")
    if wrong or not broken:
        raise RuntimeError(f"{wrong} blocks came back otherwise, and {broken} of a flipped byte")
    return (
        f"copies: {NUM_BLOCKS} blocks of {NUM_LAYERS} layers out and back by vLLM's worker, 0 "
        f"differ; with a flipped byte {broken}"
    )


def codec() -> str:
    """Compile the kernels of part (e)."""
    import torch
    from kit_bridge import dry_device

    from tests.gpu.kit import window_kernels as kernels

    values = torch.zeros(2 * kernels.HALF, dtype=torch.int16)
    coded = torch.zeros(kernels.SLOT_BYTES, dtype=torch.uint8)
    starts, sizes = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    kernels.start_encoding(values, coded, sizes)
    kernels.start_gathering(coded, starts, sizes, coded)
    kernels.start_decoding(coded, starts, starts, values)
    return f"codec: {', '.join(dry_device.started)} compiled for sm_90"


def engine(kind: str) -> str:
    """Start an engine with the connector, and have it compute, store and name blocks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from prfaas.engines.launch import engine_id
    from prfaas.engines.vllm_connector import PrfaasConnector

    with tempfile.TemporaryDirectory(prefix="kit-") as local:
        models.make(kind, Path(local) / "model")
        transfer = {
            "kv_connector": "PrfaasConnector",
            "kv_connector_module_path": "prfaas.engines.vllm_connector",
            "kv_role": "kv_both",
            "engine_id": engine_id(kind, "dry"),
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 64 << 20,
                "prfaas_engine": "dry",
                "prfaas_pool": f"{local}/no-pool",
            },
        }
        is_hybrid = kind == models.HYBRID_KIND
        more = {"mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton"}
        model = LLM(
            f"{local}/model",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=2048,
            max_num_seqs=4,
            async_scheduling=False,
            attention_config={"backend": "TRITON_ATTN"},
            compilation_config={"custom_ops": ["none"], "mode": 0},
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=transfer,
            **(more if is_hybrid else {}),
        )
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        prompt = {"prompt_token_ids": [65 + at * at % 26 for at in range(PROMPT_TOKENS)]}
        found = model.generate([prompt], sampling)[0].outputs[0].token_ids
        from kit_bridge import dry_device

        connector = model.llm_engine.engine_core.engine_core.scheduler.connector
        if not isinstance(connector, PrfaasConnector) or len(found) != 4:
            raise RuntimeError(f"connector {type(connector).__name__}, {len(found)} tokens")
        groups = connector._tier._layout.groups
        described = ", ".join(
            f"{group.kind.value} {group.tokens_per_block} tokens {group.block_bytes:,} B"
            for group in groups
        )
        return (
            f"{kind}: {len(set(dry_device.started))} Triton kernels compiled for sm_90, "
            f"{len(dry_device.started)} starts; {len(groups)} groups: {described}"
        )


def deployment() -> str:
    """Run the deployment of parts (a) and (d), and hand a prompt over.

    Its answer means nothing, since no kernel starts; its path and its bytes do.
    """
    return asyncio.run(_handed_over())


async def _handed_over() -> str:
    from prfaas.planner.model.hf_config import geometry_from_config
    from prfaas.planner.model.kv_geometry import shipped_kv_bytes
    from tests.gpu.kit.deployment import running, settings
    from tests.live.identity_by_kind import announced, ask

    kind = models.HYBRID_KIND
    with tempfile.TemporaryDirectory(prefix="kit-") as local:
        make = partial(models.make, kind)
        async with running(Path(local), settings("cuda", kind, 8192), make) as (live, _):
            layout = await announced(live.topology)
            config = json.loads((Path(local) / "model" / "config.json").read_text())
            geometry = geometry_from_config(config, state_dtype="float32")
            prompt = [65 + at * at % 26 for at in range(HANDED_TOKENS)]
            body: dict[str, object] = {"model": live.model, "prompt": prompt, "max_tokens": 4}
            _, request = await ask(live.http, live.url, body)
            record = await live.record(request)
            planned = shipped_kv_bytes(geometry, HANDED_TOKENS, layout.boundary_tokens)
    is_good = record["path"] == "remote" and record["fallback"] is None
    if not is_good or record["kv_bytes"] != planned:
        raise RuntimeError(f"{planned} bytes planned: {record}")
    return (
        f"deployment: two engines, two pool nodes, a gateway; {HANDED_TOKENS} tokens "
        f"prefilled remotely, {record['kv_bytes']:,} bytes shipped, as planned"
    )


STEPS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "copies": copies,
    "codec": codec,
    "dense": lambda: engine(models.DENSE),
    "hybrid": lambda: engine(models.HYBRID_KIND),
    "deployment": deployment,
}


def main() -> int:
    """Run each step in a process of its own; 0 if all hold."""
    if sys.argv[1:2] == ["--step"]:
        print(json.dumps(STEPS[sys.argv[2]]()), flush=True)
        # Threads of an engine that is not closed would keep the process.
        os._exit(0)
    is_good = True
    for name in STEPS:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.kit.dry_run", "--step", name],
            env=os.environ | ENV,
            capture_output=True,
            text=True,
            check=False,
        )
        words = [line for line in done.stdout.splitlines() if line.startswith('"')]
        if done.returncode == 0 and words:
            print(f"{json.loads(words[-1])} ({time.monotonic() - began:.0f} s)", flush=True)
        else:
            is_good = False
            print(f"{name} FAILED, code {done.returncode}:\n{done.stderr[-3000:]}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
