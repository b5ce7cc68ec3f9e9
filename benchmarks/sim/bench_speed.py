"""Requests simulated per second: Mooncake's conversation, and synthetic load on more instances.

python benchmarks/sim/bench_speed.py [--instances 10,100,1250] [--requests 50000]
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path

from prfaas.core.policies import PolicyName
from prfaas.sim.run import run
from prfaas.sim.scenario import Scenario, load_scenario
from prfaas.sim.workloads.synthetic import Synthetic
from prfaas.units import NS_PER_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"


def timed(name: str, scenario: Scenario) -> None:
    started = time.process_time()
    found = run(scenario)
    seconds = time.process_time() - started
    count = len(found.simulation.requests)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name}: {count:,} requests, {found.results.num_events:,} events in {seconds:.2f} s of "
        f"one core: {count / seconds:,.0f} requests/s, {seconds / count * 1e6:.0f} µs each, "
        f"peak memory so far {memory:,.0f} MiB",
        flush=True,
    )


def scaled(base: Scenario, instances: int, requests: int) -> Scenario:
    """The paper's shape (4 : 3 : 5 instances of 12) at another size."""
    factor = instances / 12
    source = base.workload.source
    assert isinstance(source, Synthetic)
    rate = 2.5 * factor
    duration_ns = round(requests / rate * NS_PER_S)
    setup = replace(
        base.setup,
        num_prfaas=max(round(4 * factor), 1),
        num_prefill=max(round(3 * factor), 1),
        num_decode=max(round(5 * factor), 1),
        link=replace(base.setup.link, bits_per_s=100e9 * factor),
    )
    source = replace(source, rate_per_s=rate, duration_ns=duration_ns)
    workload = replace(base.workload, source=source)
    return replace(base, setup=setup, workload=workload, start_ns=0, end_ns=duration_ns)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instances", default="12,120,1250")
    parser.add_argument("--requests", type=int, default=50_000)
    options = parser.parse_args()
    mooncake = load_scenario(EXAMPLES / "mooncake.toml")
    timed("Mooncake conversation, adaptive", mooncake)
    base = load_scenario(EXAMPLES / "paper-poisson.toml").with_policy(PolicyName.ADAPTIVE)
    for instances in map(int, options.instances.split(",")):
        timed(f"{instances} instances", scaled(base, instances, options.requests))


if __name__ == "__main__":
    main()
