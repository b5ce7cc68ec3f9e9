"""Plans of two clusters, for tests in which only times of prefills matter."""

from pathlib import Path

PLAN = """
title = "as measured"
[model]
name = "tiny"
kv_bytes_per_token = "1kB"
[workload]
distribution = "lengths"
lengths = [100, 4000]
output_tokens = 10
[[prfaas]]
name = "remote"
instances = 1
link = {{ bandwidth = "1Gbps", rtt = "10ms" }}
prefill = {{ source = "a test", lengths = [100, 4000], seconds = [{remote}, {remote_long}] }}
[pd]
name = "home"
instances = {instances}
prefill = {{ source = "a test", lengths = [100, 4000], seconds = [{local}, {local_long}] }}
decode = {{ source = "a test", batches = [1], step = [["10ms"]] }}
"""


def plan_file(
    directory: Path, *, local_s: float = 3.0, remote_s: float = 1.0, instances: int = 1
) -> Path:
    """Prefill takes so long at 100 tokens, and ten times that at 4,000."""
    path = directory / "plan.toml"
    values = {"local": local_s, "remote": remote_s}
    longs = {f"{name}_long": 10 * seconds for name, seconds in values.items()}
    path.write_text(PLAN.format(instances=instances, **values, **longs))
    return path
