"""The command lines that start engines as parts of a deployment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.config.clusters import ClusterRole, ClusterTable, EngineTable
from prfaas.config.deployment import ModelTable
from prfaas.config.engines.block_tokens import SETTING as BLOCK_TOKENS
from prfaas.config.engines.cores import BIND, runs_on_cpu

HASH_SEED = "0"
NO_HOST = "none.invalid"
"""A name that is nobody's: an empty list would let vLLM fetch from everywhere."""
FORGET_ROUTE = "prfaas.engines.vllm_forget.ForgetRoute"


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: arguments and environment, no shell."""

    args: list[str]
    env: dict[str, str]


def engine_id(name: str, run: str) -> str:
    """vLLM's id of an engine; it names the engine's file in shared memory."""
    return f"prfaas-{name}-{run}"


def shared_memory_files(name: str, run: str) -> Path:
    """Pattern of the files in which vLLM keeps an engine's host memory.

    A killed engine leaves them behind. Data-parallel ranks append `_dp{rank}` to the engine's id.
    """
    return Path(f"/dev/shm/vllm_offload_{engine_id(name, run)}*")  # noqa: S108


def engine_command(
    name: str,
    engine: EngineTable,
    model: ModelTable,
    address: tuple[str, int],
    pool: Path,
    run: str,
) -> Command:
    """Command to start an engine.

    Args:
        name: Its name in the deployment file.
        address: Host and port it listens on.
        pool: Unix socket of its pool node.
        run: Identifier of this start of the deployment.
    """
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.engines.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": engine_id(name, run),
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": engine.host_memory,
            "prfaas_engine": name,
            "prfaas_pool": str(pool.absolute()),
        }
        | ({} if model.block_tokens is None else {BLOCK_TOKENS: model.block_tokens}),
    }
    host, port = address
    args = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    args += ["--model", model.path, "--served-model-name", model.name]
    args += ["--host", host, "--port", str(port)]
    args += _media(model)
    args += ["--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"]
    args += ["--middleware", FORGET_ROUTE]
    args += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
    if engine.kv_events is not None:
        args += ["--kv-events-config", json.dumps(_events(engine))]
    if runs_on_cpu():
        args += ["--dtype", "bfloat16", "--enforce-eager"]
    return Command(args + engine.args, _environment(engine))


def timing_command(
    names: list[str],
    cluster: tuple[str, ClusterTable],
    model: ModelTable,
    addresses: Mapping[str, tuple[str, int]],
    pool: Path,
) -> Command:
    """Command to start timing engines in one process.

    Args:
        names: Their names in the deployment file, at least one.
        cluster: Their cluster's name and table.
        addresses: Host and port each listens on.
        pool: Unix socket of their pool node.
    """
    cluster_name, table = cluster
    engines, timing = [table.engines[name] for name in names], table.timing
    if timing is None:
        raise ValueError(f"cluster {cluster_name} has no timing engines")
    args = [sys.executable, "-m", "prfaas", "engine", "timing"]
    for name in names:
        host, port = addresses[name]
        args += ["--engine", f"{name}={host}:{port}"]
    args += ["--plan", str(timing.plan), "--model", model.name, "--model-path", model.path]
    args += ["--cluster", cluster_name] if table.role is ClusterRole.PRFAAS else []
    args += ["--pool", str(pool), "--host-memory", f"{max(e.host_memory for e in engines)}B"]
    args += ["--time-scale", str(timing.time_scale), "--bytes-scale", str(timing.bytes_scale)]
    args += ["--block-tokens", str(timing.block_tokens)]
    args += ["--cache-tokens", str(timing.cache_tokens)]
    args += ["--max-model-len", str(timing.max_model_len)]
    args += ["--stream-interval", str(timing.stream_interval)]
    args += ["--hash-scheme", timing.hash_scheme]
    for name, engine in zip(names, engines, strict=True):
        if engine.kv_events is not None:
            places = [place for place in (engine.kv_events, engine.kv_events_replay) if place]
            args += ["--kv-events", f"{name}={','.join(places)}"]
    env = dict(os.environ)
    for engine in engines:
        args += engine.args
        env |= engine.env
    return Command(args, env)


def _media(model: ModelTable) -> list[str]:
    """Hosts from which vLLM fetches media; without the flag, from all hosts."""
    if "*" in model.media_domains:
        return []
    return [
        "--allowed-media-domains",
        *([name.lower() for name in model.media_domains] or [NO_HOST]),
    ]


def _events(engine: EngineTable) -> dict[str, object]:
    """vLLM's own publisher, which keeps the last batches for who missed some."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": engine.kv_events,
        "replay_endpoint": engine.kv_events_replay,
    }


def _environment(engine: EngineTable) -> dict[str, str]:
    env = dict(os.environ)
    env |= {
        "PYTHONHASHSEED": HASH_SEED,
        "VLLM_NO_USAGE_STATS": "1",
        # A listed host could name any other one.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_PREFIX": "",
    }
    if runs_on_cpu():
        # Unpinned engines on shared cores were measured 50 times slower.
        env |= {"KMP_BLOCKTIME": "1"}
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(engine.kv_cache_memory / 2**30)))
        if engine.cpus:
            env[BIND] = engine.cpus
    return env | engine.env
