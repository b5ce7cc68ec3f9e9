"""An engine whose second rank has a `/dev/shm` of its own, as on another host: it has to refuse.

    python -m tests.live.apart_rank

Rank 1 gets its `/dev/shm` when it is to allocate its cache, in a mount namespace of its own; needs
root. Everything else is vLLM's and the connector's. `--together` leaves it with the others: the
engine then starts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prfaas.engines.checkpoint import make_checkpoint
from prfaas.engines.launch import engine_id, shared_memory_files

APART = "PRFAAS_TEST_RANK_APART"
_NEW_MOUNTS, _REC_PRIVATE = 0x00020000, 0x4000 | 0x40000
READY = "Application startup complete"


class RankOfItsOwn:
    """Extension of vLLM's worker."""

    rank: int

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Leave the others' `/dev/shm` before this rank opens the engine's host memory."""
        if self.rank == 1 and os.environ.get(APART) == "1":
            libc = ctypes.CDLL(None, use_errno=True)
            mounts = (
                (b"none", b"/", None, _REC_PRIVATE),
                (b"tmpfs", b"/dev/shm", b"tmpfs", 0),
            )
            if libc.unshare(_NEW_MOUNTS):
                raise OSError(ctypes.get_errno(), "unshare")
            for source, target, kind, flags in mounts:
                if libc.mount(source, target, kind, flags, None):
                    raise OSError(ctypes.get_errno(), f"mount {target!r}")
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]


def worker_class() -> type:
    """A worker of vLLM's with this behaviour."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    return type("CPUWorkerApart", (RankOfItsOwn, CPUWorker), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    # vLLM looks the class up by its name in a process that may not import vLLM before.
    if name == "CPUWorkerApart":
        found = globals()[name] = worker_class()
        return found
    raise AttributeError(name)


def start(folder: Path, *, apart: bool) -> tuple[bool, str]:
    """Start an engine of two ranks until it serves or ends; True if it serves, and its log."""
    model = folder / "model"
    make_checkpoint(model)
    run = secrets.token_hex(4)
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.engines.vllm_connector",
        "kv_role": "kv_both",
        "engine_id": engine_id("apart", run),
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 26,
            "prfaas_engine": "apart",
            "prfaas_pool": str(folder / "pool.sock"),
        },
    }
    args = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    args += ["--uds", str(folder / "engine.sock"), "--dtype", "bfloat16", "--enforce-eager"]
    args += ["--prefix-caching-hash-algo", "sha256_cbor", "--tensor-parallel-size", "2"]
    args += ["--mamba-ssm-cache-dtype", "float32", "--block-size", "384"]
    args += ["--kv-transfer-config", json.dumps(transfer)]
    args += [
        "--worker-cls",
        f"{__name__ if __name__ != '__main__' else __spec__.name}.CPUWorkerApart",
    ]
    env = os.environ | {
        APART: str(int(apart)),
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "1",
    }
    with subprocess.Popen(
        args, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as engine:
        assert engine.stdout is not None
        lines = []
        for line in engine.stdout:
            lines.append(line)
            if READY in line:
                engine.terminate()
                break
        engine.communicate()
    pattern = shared_memory_files("apart", run)
    for left in pattern.parent.glob(pattern.name):
        left.unlink()
    return any(READY in line for line in lines), "".join(lines)


def main() -> int:
    """Start it, and print what it said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--together", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        serves, log = start(Path(folder), apart=not words.together)
    said = [line.strip() for line in log.splitlines() if "ConfigError" in line]
    print("serves" if serves else "refused", *said[-1:], sep="\n")
    return 0 if serves == words.together else 1


if __name__ == "__main__":
    sys.exit(main())
