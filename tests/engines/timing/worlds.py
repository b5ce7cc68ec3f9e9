"""Helpers of tests of the timing engine: a plan, a tokenizer, hosts on free ports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.engines.timing.host import HostSettings, InstanceHost

MODEL = "timing-tiny"
SPAN = 16
PLAN = """
title = "A small model"
[model]
name = "tiny"
kv_bytes_per_token = "64B"
kv_state = "4KiB"
[workload]
distribution = "lengths"
lengths = [100, 400]
output_tokens = 8
[[prfaas]]
name = "prfaas"
instances = 1
gpus_per_instance = 1
[prfaas.prefill]
source = "made up"
lengths = [16, 1000]
seconds = [0.016, 1.0]
[prfaas.link]
bandwidth = "1Gbps"
[pd]
name = "pd"
instances = 2
gpus_per_instance = 1
[pd.prefill]
source = "made up"
lengths = [16, 1000]
seconds = [0.032, 2.0]
[pd.decode]
source = "made up"
batches = [1, 4]
step = [["10ms"], ["20ms"]]
[search]
chunk = 64
"""


DENSE_PLAN = PLAN.replace('kv_state = "4KiB"\n', "")
"""The same without linear state: a prefix is usable up to any block."""


def write_plan(directory: Path, text: str = PLAN) -> Path:
    path = directory / "plan.toml"
    path.write_text(text)
    return path


def settings(plan: Path, checkpoint: Path, *names: str, **changes: Any) -> HostSettings:
    """Instances of the PD cluster, a thousand times as fast as the plan says."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "model_path": str(checkpoint),
        "plan": plan,
        "cluster": None,
        "engines": dict.fromkeys(names, ("127.0.0.1", 0)),
        "kv_events": {},
        "pool": None,
        "host_memory": 1 << 18,
        "time_scale": 0.001,
        "bytes_scale": 1.0,
        "block_tokens": SPAN,
        "cache_tokens": 4096,
        "max_model_len": 2048,
        "stream_interval": 1,
    }
    return HostSettings(**(fields | changes))


async def started(made: HostSettings) -> tuple[InstanceHost, Mapping[str, str]]:
    host = InstanceHost(made)
    return host, await host.start()
