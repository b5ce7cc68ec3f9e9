"""Replays a trace with ai-dynamo's offline replay. Runs in the peer's own environment.

python benchmarks/sim/peer_replay.py SPEC.json prints one line of JSON: seconds and figures.
`bench_speed.py --peer` writes the specification and calls this. The peer has one kind of prefill
instance and no link between clusters: a hand-off takes bytes / bandwidth, however many there are.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from dynamo import _core

SHOWN = ("completed_requests", "mean_ttft_ms", "mean_tpot_ms", "prefix_cache_reused_ratio")


def engine(spec: dict[str, Any], worker_type: str) -> Any:
    common = {
        "worker_type": worker_type,
        "block_size": spec["block_tokens"],
        "num_gpu_blocks": spec["num_blocks"],
        "max_num_seqs": spec["batch_max"],
        "max_num_batched_tokens": spec["chunk_tokens"],
    }
    bytes_per_token, rate = spec["kv_bytes_per_token"], spec["transfer_gbytes_per_s"]
    if hasattr(_core, "MockEngineArgs"):  # ai-dynamo 1.4
        apart = {"kv_bytes_per_token": bytes_per_token, "kv_transfer_bandwidth": rate}
        return _core.MockEngineArgs(
            engine_type="vllm",
            planner_profile_data=spec["profile"],
            **common,
            **({} if worker_type == "aggregated" else apart),
        )
    apart = {"kv_transfer_bytes_per_token": bytes_per_token, "kv_transfer_bandwidth": rate}
    timing = {
        "type": "external",
        "provider": "dynamo_profile",
        "config": {"path": spec["profile"]},
    }
    rank = {"backend": "vllm", "timing_model": timing, **common}
    rank |= {} if worker_type == "aggregated" else apart
    return _core._normalize_mocker_config({"engine": rank})


def workers(spec: dict[str, Any]) -> dict[str, Any]:
    if spec["mode"] == "aggregated":
        count = spec["num_prefill"] + spec["num_decode"]
        return {"extra_engine_args": engine(spec, "aggregated"), "num_workers": count}
    return {
        "prefill_engine_args": engine(spec, "prefill"),
        "decode_engine_args": engine(spec, "decode"),
        "num_prefill_workers": spec["num_prefill"],
        "num_decode_workers": spec["num_decode"],
    }


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    options = workers(spec)
    started = time.process_time()
    report = _core.run_mocker_trace_replay(
        [spec["trace"]],
        router_mode=spec["router"],
        trace_block_size=spec["block_tokens"],
        **options,
    )
    seconds = time.process_time() - started
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    summary = report if isinstance(report, dict) else report.summary
    figures = {name: summary[name] for name in SHOWN}
    print(json.dumps({"seconds": seconds, "memory_mib": memory_mib, **figures}))


if __name__ == "__main__":
    main()
