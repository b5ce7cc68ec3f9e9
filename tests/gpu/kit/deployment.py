"""The deployment of parts (a) and (d): two engines on one device, two pool nodes, a gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import parts
from tests.deployments import LAPTOP, laid_out, placed, put_between, started
from tests.gpu.kit.models import HYBRID_KIND
from tests.lab.faults import FaultProxy
from tests.live.conftest import Live, until
from tests.live.relay import Relay

CLUSTERS = (("prfaas", "prfaas-engine"), ("pd", "pd-engine"))
KERNEL_BLOCK = "KIT_KERNEL_BLOCK"
"""Variable of the bridge: tokens of the blocks in which attention reads a page."""
_BARE = ("--enforce-eager", "--attention-backend", "TRITON_ATTN", "--no-async-scheduling")
_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def has_kernels() -> bool:
    """Return True if the vLLM of this environment has its compiled kernels."""
    return find_spec("kit_bridge") is None


def engine_args(device: str, kind: str, tokens_max: int) -> list[str]:
    """Return vLLM's arguments of an engine.

    Args:
        device: "cuda" or "cpu".
        kind: Of `models.CHECKPOINTS`.
        tokens_max: Longest prompt and answer, tokens.
    """
    is_gpu = device == "cuda"
    args = ["--max-num-batched-tokens", "8192" if is_gpu else "2048"]
    if kind == HYBRID_KIND:
        args += ["--mamba-ssm-cache-dtype", "float32"]
        args += ["--gdn-prefill-backend", "triton"] if is_gpu else []
    if is_gpu:
        # A cache of a given size needs no profiling, which two engines at once would disturb.
        args += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.4", "--max-num-seqs", "16"]
        args += ["--kv-cache-memory-bytes", str(8 << 30), "--max-model-len", str(tokens_max)]
        if not has_kernels():
            compilation = json.dumps({"mode": 0, "custom_ops": ["none"]})
            args += [*_BARE, "--compilation-config", compilation]
    return args


def settings(
    device: str, kind: str, tokens_max: int, memory: str = "", kernel_block: int = 0
) -> str:
    """Return settings that take precedence over the laptop's deployment file, as TOML.

    Args:
        device: "cuda" or "cpu".
        kind: Of `models.CHECKPOINTS`.
        tokens_max: Longest prompt and answer, tokens.
        memory: Of each pool, and of each engine's part of it; empty keeps the file's.
        kernel_block: Tokens of a kernel block of the PrfaaS engine; 0 leaves it to vLLM.
    """
    lines = ['[routing]\ntransfer_timeout = "60s"\noffload_threshold = 1500\npolicy = "paper"']
    for cluster, engine in CLUSTERS:
        table = f"[clusters.{cluster}.engines.{engine}]"
        lines += [table, f"args = {json.dumps(engine_args(device, kind, tokens_max))}"]
        if memory:
            lines += [f'host_memory = "{memory}"']
        env = dict(_ENV) if device == "cuda" and not has_kernels() else {}
        if kernel_block and cluster == "prfaas":
            env[KERNEL_BLOCK] = str(kernel_block)
        if env:
            lines += [f"[clusters.{cluster}.engines.{engine}.env]"]
            lines += [f'{name} = "{value}"' for name, value in env.items()]
        if memory:
            lines += [f"[clusters.{cluster}.pools.{cluster}-pool]", f'memory = "{memory}"']
    return "\n".join(lines)


@asynccontextmanager
async def running(
    local: Path, overlay: str, make: Callable[[Path], None]
) -> AsyncIterator[tuple[Live, FaultProxy]]:
    """Run the deployment, with a link that can be slowed down or broken.

    Args:
        local: An empty folder.
        overlay: Settings.
        make: Writes the checkpoint.
    """
    make(local / "model")
    topology = await laid_out(*placed(LAPTOP, local, overlay))
    stages, link = parts(topology), FaultProxy(topology.pools["pd-pool"])
    await link.open()
    put_between(stages, "prfaas-pool", "pd-pool", link.port)
    try:
        async with started(stages) as supervisor, aiohttp.ClientSession() as http:
            live = Live(topology, supervisor, Relay(topology.pools["pd-pool"]), http)
            await until(partial(_is_ready, live), 60.0)
            yield live, link
    finally:
        await link.close()


async def _is_ready(live: Live) -> bool:
    async with live.http.get(f"{live.url}/health?full=1") as reply:
        return reply.status == 200
