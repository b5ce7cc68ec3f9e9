"""Requests simulated per second of one core, alone and against ai-dynamo's offline replay.

python benchmarks/sim/bench_speed.py [--peer VENV] [--instances 12,1250] [--requests 1000000]

Every run has a process of its own on one core, so that its peak memory is its own. With --peer the
two simulators take turns on Mooncake's conversation, and reading the trace counts for both; VENV
holds `pip install ai-dynamo==1.4.2`, or `pip install ai-dynamo-runtime==1.6.1`. With the compiled
simulator: `python hatch_build.py DIRECTORY`, then with PYTHONPATH=DIRECTORY.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import numpy as np

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.workloads.requests import Synthetic, Trace
from prfaas.traces.reader import read_requests
from prfaas.units import NS_PER_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"
TRACE = EXAMPLES / "traces" / "mooncake_conversation.jsonl.gz"
ROUNDS = 3
PEER_MODES = [
    (mode, router)
    for mode in ("disaggregated", "aggregated")
    for router in ("kv_router", "round_robin")
]


@dataclass(frozen=True)
class Timed:
    """One run: CPU time from the scenario to checked figures, and the process's peak memory."""

    num_requests: int
    num_events: int
    seconds: float
    memory_mib: float
    ttft_ms: float
    hit_ratio: float

    @property
    def per_s(self) -> float:
        return self.num_requests / self.seconds

    def row(self, name: str) -> str:
        each = self.seconds / self.num_requests * 1e6
        return (
            f"| {name} | {self.num_requests:,} | {self.per_s:,.0f} | {each:.0f} µs | "
            f"{self.seconds:,.1f} s | {self.memory_mib:,.0f} MiB |"
        )


def timed(scenario: Scenario, trace: Path | None = None) -> Timed:
    """A run; with `trace` the time to read it counts too."""
    started = time.process_time()
    if trace is not None:
        source = scenario.workload.source
        assert isinstance(source, Trace)
        source = replace(source, rows=read_requests(trace, "mooncake").rows)
        scenario = replace(scenario, workload=replace(scenario.workload, source=source))
    found = run(scenario)
    seconds = time.process_time() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    results = found.results
    return Timed(
        len(found.simulation.requests),
        results.num_events,
        seconds,
        memory,
        results.time_to_first_token["avg"],
        results.prefix_hit_ratio,
    )


def mooncake(trace: Path | None = None) -> Timed:
    return timed(load_scenario(EXAMPLES / "mooncake.toml"), trace)


def scaled(instances: int, requests: int) -> Timed:
    """The paper's shape (4 : 3 : 5 instances of 12) at another size."""
    base = load_scenario(EXAMPLES / "paper-poisson.toml").with_policy(PolicyName.ADAPTIVE)
    factor = instances / 12
    source = base.workload.source
    assert isinstance(source, Synthetic)
    rate = 2.5 * factor
    duration_ns = round(requests / rate * NS_PER_S)
    (cluster,) = base.setup.prfaas
    link = replace(cluster.link, bits_per_s=100e9 * factor)
    setup = replace(
        base.setup,
        prfaas=(replace(cluster, num_instances=max(round(4 * factor), 1), link=link),),
        num_prefill=max(round(3 * factor), 1),
        num_decode=max(round(5 * factor), 1),
    )
    source = replace(source, rate_per_s=rate, duration_ns=duration_ns)
    workload = replace(base.workload, source=source)
    return timed(replace(base, setup=setup, workload=workload, start_ns=0, end_ns=duration_ns))


def apart(function: Callable[..., Timed], *arguments: int | Path) -> Timed:
    """Run in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


# The peer


def peer_specs(directory: Path) -> Iterator[dict[str, object]]:
    """The same trace, instances, limits and PD profile, in the peer's words."""
    scenario = load_scenario(EXAMPLES / "mooncake.toml")
    setup = scenario.setup
    (cluster,) = setup.prfaas
    trace, profile = directory / "trace.jsonl", directory / "profile.npz"
    trace.write_bytes(gzip.decompress(TRACE.read_bytes()))
    costs = setup.costs
    lengths = np.linspace(1, len(costs.local_ns) - 1, 200).astype(int)
    np.savez(
        profile,
        prefill_isl=lengths.astype(float),
        prefill_ttft_ms=np.array([costs.local_ns[n] / 1e6 for n in lengths]),
        decode_active_kv_tokens=np.array([0.0, 5e6]),
        decode_context_length=np.array([1.0, 2e5]),
        decode_itl=np.full((2, 2), setup.step_ns(1, 1.0) / 1e6),
    )
    for mode, router in PEER_MODES:
        yield {
            "mode": mode,
            "router": router,
            "trace": str(trace),
            "profile": str(profile),
            "num_prefill": setup.num_prefill + cluster.num_instances,
            "num_decode": setup.num_decode,
            "block_tokens": setup.blocks.tokens,
            "num_blocks": setup.cache.host_blocks,
            "batch_max": setup.decode.batch_max,
            "chunk_tokens": len(costs.bytes_of),  # whole prompts: T(l) of each, as here
            "kv_bytes_per_token": costs.bytes_of[-1] // len(costs.bytes_of),
            "transfer_gbytes_per_s": cluster.link.bits_per_s / 8e9,
        }


def replay(python: Path, spec: dict[str, object], directory: Path) -> Timed:
    file = directory / "spec.json"
    file.write_text(json.dumps(spec))
    command = [str(python), str(Path(__file__).with_name("peer_replay.py")), str(file)]
    quiet = {**os.environ, "DYN_LOG": "error"}  # a line for each decision doubles its time
    said = subprocess.run(command, env=quiet, check=True, stdout=subprocess.PIPE).stdout
    found = json.loads(said.splitlines()[-1])
    return Timed(
        found["completed_requests"],
        0,
        found["seconds"],
        found["memory_mib"],
        found["mean_ttft_ms"],
        found["prefix_cache_reused_ratio"],
    )


def against(peer: Path) -> None:
    """Take turns; medians of the rounds."""
    ours: list[Timed] = []
    theirs: dict[tuple[str, str], list[Timed]] = {mode: [] for mode in PEER_MODES}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        specs = list(peer_specs(directory))
        for _ in range(ROUNDS):
            ours.append(apart(mooncake, directory / "trace.jsonl"))
            for mode, spec in zip(PEER_MODES, specs, strict=True):
                theirs[mode].append(replay(peer / "bin" / "python", spec, directory))
    print(f"\nMooncake conversation, medians of {ROUNDS} rounds in turn, one core\n")
    print("| simulator | requests | requests/s | ours : it | mean TTFT | prefix hits | memory |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    own = statistics.median(found.per_s for found in ours)
    print(_peer_row("prfaas, adaptive, link, pools", ours[0], own, own))
    for (name, router), found in theirs.items():
        rate = statistics.median(each.per_s for each in found)
        print(_peer_row(f"ai-dynamo, {name}, {router}", found[0], rate, own), flush=True)


def _peer_row(name: str, found: Timed, rate: float, own: float) -> str:
    return (
        f"| {name} | {found.num_requests:,} | {rate:,.0f} | {own / rate:.2f} | "
        f"{found.ttft_ms / 1e3:.2f} s | {found.hit_ratio:.1%} | {found.memory_mib:,.0f} MiB |"
    )


def sizes(instances: list[int], requests: int) -> None:
    """Cost by number of instances, and how it grows."""
    print("| run | requests | requests/s | per request | CPU time | peak memory |")
    print("|---|---:|---:|---:|---:|---:|")
    print(apart(mooncake).row("Mooncake conversation, 12 instances"), flush=True)
    found = {}
    for count in instances:
        found[count] = apart(scaled, count, requests)
        print(found[count].row(f"paper's case study, {count:,} instances"), flush=True)
    first, last = instances[0], instances[-1]
    if last > first > 1:
        growth = found[first].per_s / found[last].per_s
        bound = log(last) / log(first)
        print(f"\ncost per request grows {growth:.2f} times; log of instances {bound:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instances", default="12,120,1250")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--peer", type=Path, help="environment that has ai-dynamo")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if options.peer:
        against(options.peer)
    else:
        sizes([int(count) for count in options.instances.split(",")], options.requests)


if __name__ == "__main__":
    main()
