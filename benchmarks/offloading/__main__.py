"""What a PD engine spends on prompts that another engine prefilled, beside prefilling them itself.

    python -m benchmarks.offloading [--prompts 3] [--tokens 6000] [--rounds 1]

Starts the laptop example. Prints CPU seconds by part, in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas.cli.processes import Supervisor
from prfaas.cli.topology import Topology, parts
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started

from .cpu_time import all_cpu_seconds

OUTPUT_TOKENS = 8
PHASES = ("offloaded", "prefilled by the PD engine")


@dataclass
class Measured:
    """One phase.

    Attributes:
        name: Of the phase.
        wall_s: By the clock, seconds.
        cpu_s: CPU seconds by part.
        paths: Of the requests.
    """

    name: str
    wall_s: float
    cpu_s: dict[str, float]
    paths: list[str]


def text(num_chars: int, seed: str) -> str:
    """A text of so many characters, which is as many tokens, that no other begins like."""
    licence = (ROOT / "LICENSE").read_text() * 4
    return f"[{seed}] {licence}"[:num_chars]


async def ask(http: aiohttp.ClientSession, url: str, model: str, prompt: str) -> str:
    """Send a prompt; the path it took."""
    body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise SystemExit(f"{url} answers {reply.status}: {answer}")
        return reply.headers.get("X-Prfaas-Path", "direct")


def session() -> aiohttp.ClientSession:
    """A client that opens a connection a request: engines close those that were idle."""
    limits = aiohttp.ClientTimeout(total=600)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=limits)


async def one_by_one(
    topology: Topology,
    supervisor: Supervisor,
    http: aiohttp.ClientSession,
    phase: str,
    prompts: list[str],
    *,
    at_once: bool,
) -> Measured:
    """Send prompts, one after the other or all at once."""
    direct = phase == PHASES[1]
    url = topology.engines["pd-engine"] if direct else topology.gateway_url
    model = topology.deployment.model.name
    before, began = all_cpu_seconds(supervisor.parts), time.monotonic()
    if at_once:
        paths = await asyncio.gather(*(ask(http, url, model, p) for p in prompts))
    else:
        paths = [await ask(http, url, model, prompt) for prompt in prompts]
    wall_s, after = time.monotonic() - began, all_cpu_seconds(supervisor.parts)
    return Measured(phase, wall_s, {n: after[n] - before[n] for n in after}, list(paths))


async def measure(options: argparse.Namespace) -> list[Measured]:
    """All rounds."""
    found = []
    with tempfile.TemporaryDirectory(prefix="offloading-") as scratch:
        place = options.keep or Path(scratch)
        topology = await laid_out(*placed(LAPTOP, place))
        async with started(parts(topology)) as supervisor, session() as http:
            await asyncio.sleep(3)
            for number in range(-1, options.rounds):
                for phase in PHASES:
                    prompts = [
                        text(options.tokens, f"{phase} {number} {i}")
                        for i in range(options.prompts)
                    ]
                    result = await one_by_one(
                        topology, supervisor, http, phase, prompts, at_once=options.at_once
                    )
                    if number >= 0:
                        found.append(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--keep", type=Path, help="new folder where logs stay")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for row in asyncio.run(measure(options)):
        cpu = ", ".join(f"{n} {s:.2f}" for n, s in row.cpu_s.items())
        all_s = sum(row.cpu_s.values())
        print(f"{row.name}: {row.wall_s:.2f} s, CPU {cpu}, all {all_s:.2f}, {row.paths}")


if __name__ == "__main__":
    main()
