"""Faults of the drill in the simulator, with its plan and the same requests: how many are touched.

python -m tests.drill.simulated [--rounds 10] [--slower 2] [--gateways 2]

The PD instances prefill and decode, as those of the drill do. Compare with

python -m tests.drill.serving --gateways 1 --rounds 10 --slower 2 --fresh --only KIND ...
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import check
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import (
    BlockSetup,
    CacheSetup,
    DecodeLimits,
    Failure,
    FailureKind,
    Setup,
)
from prfaas.units import NS_PER_S

from .load import PREFIX_TOKENS, lengths
from .serving import PER_S, Kind, Times
from .site import SLOW_BITS_PER_S, plan_text
from .two_gateways import split

TIMES = Times()
SHOWN = (
    Kind.NOTHING,
    Kind.PREFILL_ENGINE,
    Kind.DECODE_ENGINE,
    Kind.FROZEN_ENGINE,
    Kind.SOURCE_POOL,
    Kind.CUT,
    Kind.SILENT,
    Kind.SLOW,
)
LINK_BITS_PER_S, BLOCK_TOKENS = 1e9, 64
RESET_NS = NS_PER_S // 20
"""Until a pool node has told the gateway that the connections of a link were reset."""
SCENARIO = """
title = "The drill"
plan = "plan.toml"
[workload]
rate = 20
duration = "18s"
[routing]
threshold = 2000
prefill_instances = 1
prefill_timeout = "60s"
transfer_timeout = "5s"
[link]
rtt = "1ms"
"""


def setup_of(directory: Path, kind: Kind, times: Times, slower: float) -> Setup:
    """The drill's system and a fault."""
    (directory / "plan.toml").write_text(plan_text(slower=slower))
    (directory / "drill.toml").write_text(SCENARIO)
    setup = load_scenario(directory / "drill.toml").setup
    cache, link = CacheSetup(host_blocks=None, device_blocks=0), setup.prfaas[0].link
    if kind is Kind.CUT:
        link = replace(link, dead_after_ns=RESET_NS)
    return replace(
        setup,
        prfaas=(replace(setup.prfaas[0], link=link, cache=cache),),
        num_prefill=2,
        num_decode=0,
        routing=replace(setup.routing, policy=PolicyName.PAPER),
        decode=DecodeLimits(64),
        cache=cache,
        blocks=BlockSetup(BLOCK_TOKENS, checkpoint_blocks=1),
        failures=tuple(faults(kind, times, slower)),
    )


def faults(kind: Kind, times: Times, slower: float) -> Iterator[Failure]:
    """Fault of a round."""
    of = {
        Kind.PREFILL_ENGINE: FailureKind.PRFAAS,
        Kind.DECODE_ENGINE: FailureKind.DECODE,
        Kind.FROZEN_ENGINE: FailureKind.FREEZE,
        Kind.SOURCE_POOL: FailureKind.POOL,
        Kind.CUT: FailureKind.LINK,
        Kind.SILENT: FailureKind.LINK,
        Kind.SLOW: FailureKind.LINK,
    }
    left = SLOW_BITS_PER_S / slower / LINK_BITS_PER_S if kind is Kind.SLOW else 0.0
    if kind in of:
        at_ns, for_ns = round(times.quiet_s * NS_PER_S), round(times.broken_s * NS_PER_S)
        yield Failure(of[kind], at_ns, for_ns, capacity_ratio=left)


def requests(seed: int, times: Times, per_s: float) -> list[Request]:
    """The requests of a round of the drill."""
    found, number = [], round((2 * times.quiet_s + times.broken_s) * per_s)
    for index, (num_own, prefix, num_output) in enumerate(islice(lengths(seed), number)):
        num_prompt = num_own + (0 if prefix is None else PREFIX_TOKENS)
        names = [(index + 1) * 1000 + block for block in range(-(-num_prompt // BLOCK_TOKENS))]
        if prefix is not None:
            shared = PREFIX_TOKENS // BLOCK_TOKENS
            names[:shared] = [-prefix * 1000 - block - 1 for block in range(shared)]
        at_ns = round(index / per_s * NS_PER_S)
        found.append(Request(index, at_ns, num_prompt, num_output, block_ids=tuple(names)))
    return found


def played(
    kind: Kind, seed: int, times: Times = TIMES, slower: float = 1.0, num_gateways: int = 1
) -> Simulation:
    """A round, of engines that are `slower` and have as many requests fewer."""
    with tempfile.TemporaryDirectory() as directory:
        setup = setup_of(Path(directory), kind, times, slower)
    simulation = Simulation(setup, requests(seed, times, PER_S / slower))
    split(simulation, num_gateways)
    simulation.run()
    check(simulation)
    return simulation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--gateways", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", type=Kind, nargs="*", choices=SHOWN, default=SHOWN)
    arguments = parser.parse_args()
    print("| fault | rounds | requests touched | of each round | why |\n|---|---:|---:|---|---|")
    for kind in arguments.only:
        seeds = range(1, arguments.rounds + 1)
        how = {"slower": arguments.slower, "num_gateways": arguments.gateways}
        rounds = [played(kind, seed, **how) for seed in seeds]
        found = [len(one.reactions.touched) for one in rounds]
        why = sum((one.reactions.fallbacks for one in rounds), start=Counter[str]())
        reasons = ", ".join(f"{reason} {count}" for reason, count in why.most_common())
        each = ", ".join(map(str, found))
        print(f"| {kind} | {len(found)} | {sum(found)} | {each} | {reasons} |", flush=True)


if __name__ == "__main__":
    main()
