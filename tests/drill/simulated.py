"""Faults of the drill in the simulator, with the drill's plan and load: requests touched.

python -m tests.drill.simulated

The simulator has no instance that prefills and decodes: the PD cluster has two of each kind, and a
decode engine that dies is one of both. Decode steps are longer by the prefills of short prompts,
which engines of the drill run in the same steps. Mean, minimum and maximum of 100 seeds.
"""

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import check
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import DecodeLimits, Failure, FailureKind, Setup
from prfaas.units import NS_PER_S

from .clients import LONG_RATIO, LONG_TOKENS, OUTPUT_TOKENS, PREFIX_TOKENS, SHORT_TOKENS
from .serving import PER_S, Kind, Times
from .site import PLAN, SLOW_BITS_PER_S

SEEDS = range(100)
SHOWN = (
    Kind.NOTHING,
    Kind.PREFILL_ENGINE,
    Kind.DECODE_ENGINE,
    Kind.SOURCE_POOL,
    Kind.CUT,
    Kind.SLOW,
)
LINK_BITS_PER_S, CONNECTIONS = 1e9, 2
SCENARIO = """
title = "The drill"
plan = "plan.toml"
[workload]
rate = 20
duration = "18s"
[routing]
threshold = 2000
prefill_instances = 2
prefill_timeout = "60s"
transfer_timeout = "5s"
[link]
rtt = "1ms"
"""


def setup_of(directory: Path) -> Setup:
    """The drill's system: two instances that prefill and two that decode in the PD cluster."""
    (directory / "plan.toml").write_text(PLAN.replace("instances = 2\ngpus", "instances = 4\ngpus"))
    (directory / "drill.toml").write_text(SCENARIO)
    setup = load_scenario(directory / "drill.toml").setup
    prfaas = replace(setup.prfaas[0], num_instances=2)
    routing = replace(setup.routing, policy=PolicyName.PAPER)
    prefill_ns = setup.costs.local_prefill_ns(sum(SHORT_TOKENS) // 2)
    busy = PER_S / 2 * (1 - LONG_RATIO) * prefill_ns / NS_PER_S
    return replace(
        setup,
        prfaas=(prfaas,),
        num_decode=2,
        routing=routing,
        decode=DecodeLimits(64),
        step_ns=lambda batch, context: round(setup.step_ns(batch, context) / (1 - busy)),
    )


def faults(kind: Kind, times: Times) -> tuple[Failure, ...]:
    """Fault of a round."""
    at_ns, for_ns = round(times.quiet_s * NS_PER_S), round(times.broken_s * NS_PER_S)
    slow = CONNECTIONS * SLOW_BITS_PER_S / LINK_BITS_PER_S
    return {
        Kind.NOTHING: (),
        Kind.PREFILL_ENGINE: (Failure(FailureKind.PRFAAS, at_ns, for_ns),),
        Kind.DECODE_ENGINE: (
            Failure(FailureKind.DECODE, at_ns, for_ns),
            Failure(FailureKind.PREFILL, at_ns, for_ns),
        ),
        Kind.SOURCE_POOL: (Failure(FailureKind.POOL, at_ns, for_ns),),
        Kind.CUT: (Failure(FailureKind.LINK, at_ns, for_ns),),
        Kind.SLOW: (Failure(FailureKind.LINK, at_ns, for_ns, capacity_ratio=slow),),
    }[kind]


def requests(seed: int, times: Times) -> list[Request]:
    """The drill's clients: one request after the other, one in ten long."""
    chance, found = random.Random(seed), []
    for index in range(round((2 * times.quiet_s + times.broken_s) * PER_S)):
        lengths = LONG_TOKENS if chance.random() < LONG_RATIO else SHORT_TOKENS
        prompt, output = chance.randint(*lengths), chance.randint(*OUTPUT_TOKENS)
        if lengths is LONG_TOKENS and chance.random() < 0.5:
            prompt += PREFIX_TOKENS
        found.append(Request(index, round(index / PER_S * NS_PER_S), prompt, output))
    return found


def touched(setup: Setup, kind: Kind, times: Times) -> list[int]:
    """Requests that left their route, by seed."""
    found = []
    for seed in SEEDS:
        broken = replace(setup, failures=faults(kind, times))
        simulation = Simulation(broken, requests(seed, times))
        simulation.run()
        check(simulation)
        found.append(len(simulation.reactions.touched))
    return found


def main() -> None:
    times = Times()
    print("| fault | requests touched: mean | minimum | maximum |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as directory:
        setup = setup_of(Path(directory))
        for kind in SHOWN:
            found = touched(setup, kind, times)
            print(f"| {kind} | {mean(found):.1f} | {min(found)} | {max(found)} |", flush=True)


if __name__ == "__main__":
    main()
