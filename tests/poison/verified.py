"""Verification of transfers with real engines: false alarms, and the bar of an altered pool.

    python -m tests.poison.verified --seconds 200            honest engines, every transfer verified
    python -m tests.poison.verified --different              other chunks and threads
    python -m tests.poison.verified --env ONEDNN_MAX_CPU_ISA=AVX512_CORE   other kernels
    python -m tests.poison.verified --alter block --one-in 5 a pool that zeroes one block in eight
    python -m tests.poison.verified --alter block --evade abort   and stops its transfers at the end

Prompts of mixed lengths are asked in groups of 1, 2, 4 and 8, so that the batches of both clusters
differ from those of the verification. Exits with 1 after an alarm without alteration, or if an
altered pool was not barred.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started

SOURCE, ENGINE = "prfaas-pool", "prfaas-engine"
GROUPS = (1, 2, 4, 8)
SETTINGS = """
[routing]
offload_threshold = 400
verify_one_in = {one_in}
"""
DIFFERENT = """
[clusters.prfaas.engines.prfaas-engine]
cpus = "0"
args = [
    "--max-num-batched-tokens", "768",
    "--mamba-ssm-cache-dtype", "float32", "--block-size", "384",
]
"""
"""Other chunks and another number of threads in the PrfaaS cluster than in the PD cluster."""
KERNELS = """
[clusters.prfaas.engines.prfaas-engine.env]
{lines}
"""
"""Variables that have the PrfaaS engine use other kernels than the PD engine."""


class Run:
    """A running deployment, and what it has verified."""

    def __init__(self, topology: Topology, http: aiohttp.ClientSession, chance: random.Random):
        self._topology, self._http, self._chance = topology, http, chance
        self._words = (ROOT / "LICENSE").read_text().split()

    async def ask(self) -> None:
        """One prompt of 500 to 2,500 tokens that nobody has asked before."""
        count = self._chance.randrange(250, 900)
        text = " ".join(self._chance.choices(self._words, k=count))
        body = {"model": "prfaas-demo", "prompt": text, "max_tokens": 4, "temperature": 0}
        async with self._http.post(
            f"{self._topology.gateway_url}/v1/completions", json=body
        ) as reply:
            await reply.read()

    async def samples(self, name: str) -> dict[str, float]:
        """Samples of a metric of the gateway, by their labels."""
        async with self._http.get(f"{self._topology.gateway_url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        found = [line.removeprefix(name).rsplit(" ", 1) for line in lines if line.startswith(name)]
        return {labels: float(value) for labels, value in found}

    async def is_linked(self) -> None:
        while True:
            async with self._http.get(f"{self._topology.gateway_url}/control/status") as reply:
                links = (await reply.json())["links"]
            if links and all(link["is_up"] for link in links):
                return
            await asyncio.sleep(0.1)

    async def is_barred(self) -> bool:
        async with self._http.get(f"{self._topology.gateway_url}/control/status") as reply:
            engines = (await reply.json())["engines"]
        return any(each["name"] == ENGINE and each["is_drained"] for each in engines)


async def run(local: Path, alter: str, one_in: int, seconds: float, differing: str) -> bool:
    """Return True if all is as it should be."""
    settings = SETTINGS.format(one_in=one_in) + differing
    topology = await laid_out(*placed(LAPTOP, local, settings))
    stages = parts(topology)
    if alter:
        flag = local / "alters"
        flag.write_text(alter)
        part = next(part for stage in stages for part in stage if part.name == SOURCE)
        at = part.command.args.index("prfaas")
        part.command.args[at : at + 1] = ["tests.poison.altered_pool", str(flag)]
        part.command.env["PYTHONPATH"] = str(ROOT)
    limit = aiohttp.ClientTimeout(total=120)
    async with started(stages), aiohttp.ClientSession(timeout=limit) as http:
        world = Run(topology, http, random.Random(1))
        await world.is_linked()
        ends_at, num_asked, is_barred = time.monotonic() + seconds, 0, False
        for group in itertools.cycle(GROUPS):
            if time.monotonic() > ends_at or is_barred:
                break
            await asyncio.gather(*(world.ask() for _ in range(group)))
            num_asked += group
            is_barred = bool(alter) and await world.is_barred()
        print(f"{num_asked} prompts")
        outcomes = await world.samples("prfaas_verifications_total")
        print(f"barred: {is_barred}")
        for name in (
            "prfaas_verifications_total",
            "prfaas_verification_difference",
            "prfaas_verification_suspicions_total",
        ):
            for labels, value in (await world.samples(name)).items():
                print(f"{name}{labels} {value:g}")
    num_altered = outcomes.get('{outcome="altered"}', 0.0)
    return is_barred if alter else not num_altered


def main() -> None:
    """Run it and judge it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alter", choices=("", "byte", "block"), default="")
    parser.add_argument("--evade", choices=("", "abort", "silent", "miscount"), default="")
    parser.add_argument("--one-in", type=int, default=1)
    parser.add_argument("--different", action="store_true", help="other chunks and threads")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--env", nargs="*", default=[], help="variables of the PrfaaS engine")
    asked = parser.parse_args()
    lines = [
        f'{name} = "{value}"' for name, _, value in (each.partition("=") for each in asked.env)
    ]
    differing = DIFFERENT if asked.different else ""
    differing += KERNELS.format(lines="\n".join(lines)) if lines else ""
    with tempfile.TemporaryDirectory() as local:
        altering = f"{asked.alter} {asked.evade}".strip()
        is_right = asyncio.run(run(Path(local), altering, asked.one_in, asked.seconds, differing))
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
