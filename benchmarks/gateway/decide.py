"""Time of one decision: the gateway's driver, many instances, a large prefix index.

python benchmarks/gateway/decide.py [--instances 200] [--blocks 2000000] [--prompt-tokens 32768]
    [--shared-tokens 0] [--roles] [--block-tokens 512] [--known-share 1]

A turn of an agent: --blocks 10000000 --prompt-tokens 142000 --block-tokens 16 --known-share 0.96

Every decision looks a prompt of a random family up in every pool, picks instances, predicts both
paths and books the result, while earlier requests end. Prints percentiles of one decision, by the
clock and in CPU time, and of the look-up alone. With `--shared-tokens` the same is measured
without a shared prefix as well, and the ratio of both in CPU time is printed. With
`--known-share` every prompt is known up to there and new from there on. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import gc
import time
from random import Random

from prfaas.config.deployment import Deployment
from prfaas.core.dispatch.types import Arrival
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.hashes import Hashes
from prfaas.core.kv.prefix_index import PrefixIndex, Tier
from prfaas.core.routing.predictions import Costs
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.dispatcher_setup import Profiles
from prfaas.gateway.routing.part_states import PoolView
from prfaas.units import NS_PER_S

NUM_DECISIONS, NUM_OPEN = 5000, 500
COSTS = Costs(
    [300_000 * n for n in range(1000)],
    [100_000 * n for n in range(1000)],
    [20_000 * n for n in range(1000)],
    500_000,
    8192,
)


def layout_of(span: int) -> Layout:
    """Full attention, with linear state where blocks are large."""
    groups = (
        CacheGroup(0, GroupKind.FULL_ATTENTION, span, 2**16),
        CacheGroup(1, GroupKind.LINEAR_STATE, span, 2**20),
    )
    return Layout(b"L" * 32, span, "0", groups if span >= 512 else groups[:1])


LAYOUT = layout_of(512)


def deployment(num_local: int, num_remote: int, *, roles: bool = False) -> Deployment:
    """Half the instances in each cluster, eight to a pool node; with roles, every other one of the
    PD cluster only decodes."""

    def cluster(role: str, count: int) -> dict[str, object]:
        engines = {f"{role}-{i:03}": {"pool": f"{role}-pool-{i // 8:02}"} for i in range(count)}
        for number, engine in enumerate(engines.values()):
            if roles and role == "pd":
                engine["role"] = "decode" if number % 2 else "prefill"
        pools: dict[str, object] = {engine["pool"]: {} for engine in engines.values()}
        return {"role": role, "pools": pools, "engines": engines}

    return Deployment.model_validate(
        {
            "model": {"name": "m", "path": "nowhere"},
            "routing": {"offload_threshold": 8000, "plan": "given.toml"},
            "security": {"identities": "nowhere"},
            "clusters": {"pd": cluster("pd", num_local), "prfaas": cluster("prfaas", num_remote)},
        }
    )


def chain(family: int, num_blocks: int, num_shared: int) -> Hashes:
    """Hashes of a family's prompt, which begins like those of all families."""
    ends = (Random(0).randbytes(32 * num_shared), Random(family + 1).randbytes(32 * num_blocks))
    return Hashes((ends[0] + ends[1][len(ends[0]) :])[: 32 * num_blocks])


def make(
    layout: Layout,
    num_instances: int,
    num_blocks: int,
    prompt_blocks: int,
    num_shared: int,
    *,
    roles: bool = False,
) -> tuple[Driver, int]:
    """A driver in whose index every pool holds an equal part of all families, and all hold the
    first blocks of every prompt, engines in their own memory as well."""
    file = deployment(num_instances - num_instances // 2, num_instances // 2, roles=roles)
    index = PrefixIndex(num_blocks_max=2**40)
    driver = Driver(file, Profiles(COSTS, {"prfaas": COSTS}, {"prfaas": 1e11}), index)
    local = list(file.clusters["pd"].pools)
    remote = list(file.clusters["prfaas"].pools)
    pools = local + remote
    numbers = range(len(layout.groups))
    num_families = max(1, num_blocks // (len(numbers) * prompt_blocks))
    for pool in pools:
        index.end_snapshot(pool)
    for family in range(num_families):
        hashes = chain(family, prompt_blocks, num_shared)[num_shared:]
        keys = [BlockKey(g, h) for h in hashes for g in numbers]
        index.add(pools[family % len(pools)], layout.layout_id, keys)
    shared = [BlockKey(g, h) for h in chain(0, num_shared, num_shared) for g in numbers]
    for pool in pools if shared else ():
        index.add(pool, layout.layout_id, shared)
    for cluster in file.clusters.values() if shared else ():
        for name in cluster.engines:
            index.end_snapshot(name)
            index.add(name, layout.layout_id, shared, Tier.DEVICE)
    now = time.monotonic_ns()
    for cluster in file.clusters.values():
        for name, engine in cluster.engines.items():
            layouts = {n: layout for n, e in cluster.engines.items() if e.pool == engine.pool}
            links = dict.fromkeys(local, True)
            driver.pool_seen(engine.pool, PoolView(True, layouts, links), now)
            driver.engine_ready(name, 10**6, now)
    return driver, num_families


def report(driver: Driver) -> int:
    """Report the queue of every engine, as probes do each second; return the time."""
    now_ns = time.monotonic_ns()
    for name in driver._pool_of:
        driver.engine_seen(name, 0, now_ns, 0)
    return now_ns


def percentiles(durations_ns: list[int]) -> str:
    ordered = sorted(durations_ns)
    shown = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    at = [(name, ordered[min(int(q * len(ordered)), len(ordered) - 1)]) for name, q in shown]
    return "  ".join(f"{name} {value / 1e3:8.0f} us" for name, value in at)


def measure(options: argparse.Namespace, num_shared: int) -> list[int]:
    """Print the times of decisions; return them in CPU time, ns."""
    layout = layout_of(options.block_tokens)
    prompt_blocks = options.prompt_tokens // options.block_tokens
    driver, num_families = make(
        layout, options.instances, options.blocks, prompt_blocks, num_shared, roles=options.roles
    )
    num_known = int(options.known_share * prompt_blocks)
    gc.freeze()
    draw, decisions, lookups = Random(1), [], []
    cpu: list[int] = []
    reported_at_ns = report(driver)
    for number in range(options.decisions):
        among = num_families if options.known_share < 1 else 2 * num_families
        hashes = chain(draw.randrange(among), prompt_blocks, num_shared)
        new = chain(-number - 2, prompt_blocks - num_known, 0)
        length = options.prompt_tokens + 1
        arrival = Arrival(
            number,
            length,
            length,
            shippable_tokens=layout.last_boundary(length),
            layout=layout,
            hashes=Hashes(hashes[:num_known].data + new.data),
        )
        started, cpu_started = time.perf_counter_ns(), time.thread_time_ns()
        driver.route(arrival, time.monotonic_ns())
        decisions.append(time.perf_counter_ns() - started)
        cpu.append(time.thread_time_ns() - cpu_started)
        started = time.perf_counter_ns()
        driver.cached(arrival)
        lookups.append(time.perf_counter_ns() - started)
        if time.monotonic_ns() - reported_at_ns > NS_PER_S:
            reported_at_ns = report(driver)
        if number >= NUM_OPEN:
            driver.prefilled(number - NUM_OPEN // 2, time.monotonic_ns())
            driver.end(number - NUM_OPEN, time.monotonic_ns())
    print(f"{num_shared * options.block_tokens:,} tokens shared by all prompts, pools and engines")
    print(f"decision  {percentiles(decisions)}")
    print(f"CPU time  {percentiles(cpu)}")
    print(f"look-up   {percentiles(lookups)}")
    return cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=2_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument(
        "--shared-tokens", type=int, default=0, help="that all pools and engines hold"
    )
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--known-share", type=float, default=1.0, help="of each prompt")
    parser.add_argument("--decisions", type=int, default=NUM_DECISIONS)
    parser.add_argument("--roles", action="store_true", help="half the PD engines only decode")
    options = parser.parse_args()
    print(
        f"{options.instances} instances, {options.blocks:,} blocks, "
        f"{options.prompt_tokens + 1:,} tokens a prompt"
    )
    alone = sorted(measure(options, 0))
    if num_shared := options.shared_tokens // options.block_tokens:
        shared = sorted(measure(options, num_shared))
        ratios = [
            shared[round(q * len(shared))] / alone[round(q * len(alone))] for q in (0.5, 0.99)
        ]
        print("shared / alone, CPU time  p50 {:.2f}  p99 {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
