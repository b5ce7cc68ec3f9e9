"""Time of one decision: the gateway's driver, many instances, a large prefix index.

python benchmarks/gateway/decide.py [--instances 200] [--blocks 2000000] [--prompt-tokens 32768]

Every decision looks a prompt of a random family up in every pool, picks instances, predicts both
paths and books the result, while earlier requests end. Prints percentiles of one decision, by the
clock and in CPU time, and of the look-up alone. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import gc
import random
import time

from prfaas.config.deployment import Deployment
from prfaas.core.dispatch.types import Arrival
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.routing.cost_tables import Costs
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.pool_state import PoolView
from prfaas.gateway.routing.profiles import Profiles

SPAN = 512
NUM_DECISIONS = 5000
NUM_OPEN = 500
LAYOUT = Layout(
    b"L" * 32,
    SPAN,
    "0",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, SPAN, 2**16),
        CacheGroup(1, GroupKind.LINEAR_STATE, SPAN, 2**20),
    ),
)
COSTS = Costs(
    [300_000 * n for n in range(1000)],
    [100_000 * n for n in range(1000)],
    [20_000 * n for n in range(1000)],
    500_000,
    8192,
)


def deployment(num_home: int, num_away: int) -> Deployment:
    """Half the instances in each cluster, eight to a pool node."""

    def cluster(role: str, count: int) -> dict[str, object]:
        engines = {f"{role}-{i:03}": {"pool": f"{role}-pool-{i // 8:02}"} for i in range(count)}
        pools: dict[str, object] = {engine["pool"]: {} for engine in engines.values()}
        return {"role": role, "pools": pools, "engines": engines}

    return Deployment.model_validate(
        {
            "model": {"name": "m", "path": "nowhere"},
            "routing": {"offload_threshold": 8000, "plan": "given.toml"},
            "security": {"identities": "nowhere"},
            "clusters": {"pd": cluster("pd", num_home), "prfaas": cluster("prfaas", num_away)},
        }
    )


def chain(family: int, num_blocks: int) -> list[bytes]:
    """Hashes of a family's prompt."""
    return [(family << 64 | n).to_bytes(32, "big") for n in range(num_blocks)]


def make(num_instances: int, num_blocks: int, prompt_blocks: int) -> tuple[Driver, int]:
    """A driver in whose index every pool holds an equal part of all families."""
    file = deployment(num_instances - num_instances // 2, num_instances // 2)
    index = PrefixIndex(num_blocks_max=2**40)
    driver = Driver(file, Profiles(COSTS, {"prfaas": COSTS}, {"prfaas": 1e11}), index)
    home = list(file.clusters["pd"].pools)
    away = list(file.clusters["prfaas"].pools)
    pools = home + away
    num_families = max(1, num_blocks // (2 * prompt_blocks))
    for pool in pools:
        index.end_snapshot(pool)
    for family in range(num_families):
        keys = [BlockKey(g, h) for h in chain(family, prompt_blocks) for g in (0, 1)]
        index.add(pools[family % len(pools)], LAYOUT.layout_id, keys)
    now = time.monotonic_ns()
    for cluster in file.clusters.values():
        for name, engine in cluster.engines.items():
            layouts = {n: LAYOUT for n, e in cluster.engines.items() if e.pool == engine.pool}
            links = dict.fromkeys(home, True)
            driver.pool_seen(engine.pool, PoolView(True, layouts, links), now)
            driver.engine_ready(name, 10**6, now)
    return driver, num_families


def percentiles(durations_ns: list[int]) -> str:
    ordered = sorted(durations_ns)
    shown = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    at = [(name, ordered[min(int(q * len(ordered)), len(ordered) - 1)]) for name, q in shown]
    return "  ".join(f"{name} {value / 1e3:8.0f} us" for name, value in at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=2_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    options = parser.parse_args()
    prompt_blocks = options.prompt_tokens // SPAN
    driver, num_families = make(options.instances, options.blocks, prompt_blocks)
    gc.freeze()
    draw, decisions, cpu, lookups = random.Random(1), [], [], []
    for number in range(NUM_DECISIONS):
        hashes = chain(draw.randrange(2 * num_families), prompt_blocks)
        length = options.prompt_tokens + 1
        arrival = Arrival(
            number,
            length,
            length,
            shippable_tokens=LAYOUT.last_boundary(length),
            layout=LAYOUT,
            hashes=hashes,
        )
        started, cpu_started = time.perf_counter_ns(), time.thread_time_ns()
        driver.route(arrival, time.monotonic_ns())
        decisions.append(time.perf_counter_ns() - started)
        cpu.append(time.thread_time_ns() - cpu_started)
        started = time.perf_counter_ns()
        driver.cached(arrival)
        lookups.append(time.perf_counter_ns() - started)
        if number >= NUM_OPEN:
            driver.prefilled(number - NUM_OPEN // 2, time.monotonic_ns())
            driver.end(number - NUM_OPEN, time.monotonic_ns())
    print(f"{options.instances} instances, {options.blocks:,} blocks, {length:,} tokens a prompt")
    print(f"decision  {percentiles(decisions)}")
    print(f"CPU time  {percentiles(cpu)}")
    print(f"look-up   {percentiles(lookups)}")


if __name__ == "__main__":
    main()
