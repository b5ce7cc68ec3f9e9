"""CPU time and throughput of prompts that another engine prefilled, beside prefilling them alone.

    python -m benchmarks.offloading [--tokens 6000] [--rounds 2] [--crowd 16]

Starts the laptop example: two engines and all the rest on two cores. Sends three prompts one by
one, then a crowd at once: through the gateway, which offloads all of them, and to the PD engine by
itself. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.cli.topology import Topology, parts
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started

from .cpu_time import all_cpu_seconds

OUTPUT_TOKENS = 8
ONE_BY_ONE = 3
OFFLOADED, ALONE = "offloaded", "prefilled by the PD engine"
PD_ENGINE = "pd-engine"


@dataclass(frozen=True)
class Measured:
    """Prompts that were sent together.

    Attributes:
        wall_s: By the clock, seconds.
        cpu_s: CPU seconds by part.
        num_remote: Prompts that were prefilled in the PrfaaS cluster.
    """

    wall_s: float
    cpu_s: dict[str, float]
    num_remote: int


@dataclass
class Bench:
    """The running deployment."""

    topology: Topology
    supervisor: Supervisor
    http: aiohttp.ClientSession
    number: int = 0

    async def measure(self, how: str, num_prompts: int, num_tokens: int, width: int) -> Measured:
        """Send prompts that nobody has seen, so many at a time."""
        direct = how == ALONE
        url = self.topology.engines[PD_ENGINE] if direct else self.topology.gateway_url
        prompts = [self._prompt(num_tokens) for _ in range(num_prompts)]
        before, began = all_cpu_seconds(self.supervisor.parts), time.monotonic()
        gate = asyncio.Semaphore(width)
        paths = await asyncio.gather(*(self._ask(url, prompt, gate) for prompt in prompts))
        wall_s, after = time.monotonic() - began, all_cpu_seconds(self.supervisor.parts)
        cpu_s = {name: after[name] - before[name] for name in after}
        return Measured(wall_s, cpu_s, paths.count("remote"))

    def _prompt(self, num_tokens: int) -> str:
        """A text of so many characters, which are as many tokens."""
        self.number += 1
        licence = (ROOT / "LICENSE").read_text() * 4
        return f"[{self.number}] {licence}"[:num_tokens]

    async def _ask(self, url: str, prompt: str, gate: asyncio.Semaphore) -> str:
        model = self.topology.deployment.model.name
        body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        async with gate, self.http.post(f"{url}/v1/completions", json=body) as reply:
            answer = await reply.json()
            if reply.status != 200:
                raise SystemExit(f"{url} answers {reply.status}: {answer}")
            return reply.headers.get("X-Prfaas-Path", "direct")


def table(title: str, rows: dict[str, list[Measured]]) -> str:
    """Medians of all rounds."""
    lines = [
        f"| {title} | time, s | CPU of the PD engine, s | of all parts, s | sent away |",
        "|---|---|---|---|---|",
    ]
    for how, found in rows.items():
        cells = [
            statistics.median(each.wall_s for each in found),
            statistics.median(each.cpu_s[PD_ENGINE] for each in found),
            statistics.median(sum(each.cpu_s.values()) for each in found),
        ]
        shown = " | ".join(f"{cell:.2f}" for cell in cells)
        lines.append(f"| {how} | {shown} | {sum(each.num_remote for each in found)} |")
    pd = [statistics.median(m.cpu_s[PD_ENGINE] for m in found) for found in rows.values()]
    return "\n".join([*lines, "", f"CPU of the PD engine: {pd[0] / pd[1]:.2f} of its own prefill"])


async def run(options: argparse.Namespace) -> None:
    """All rounds, the first one to warm up."""
    with tempfile.TemporaryDirectory(prefix="offloading-") as scratch:
        topology = await laid_out(*placed(LAPTOP, options.keep or Path(scratch)))
        # Engines close connections that were idle.
        once = aiohttp.TCPConnector(force_close=True)
        async with (
            started(parts(topology)) as supervisor,
            aiohttp.ClientSession(connector=once) as http,
        ):
            bench = Bench(topology, supervisor, http)
            await until_linked(bench)
            for how in (OFFLOADED, ALONE):
                await bench.measure(how, 1, options.tokens, 1)
            plans = [(ONE_BY_ONE, 1, "three, one by one"), (options.crowd,) * 2 + ("a crowd",)]
            for num_prompts, width, title in plans:
                rows: dict[str, list[Measured]] = {OFFLOADED: [], ALONE: []}
                for _ in range(options.rounds):
                    for how, found in rows.items():
                        found.append(await bench.measure(how, num_prompts, options.tokens, width))
                print(table(title, rows), end="\n\n", flush=True)


async def until_linked(bench: Bench) -> None:
    """Wait until the gateway offloads."""
    async with asyncio.timeout(60):
        while True:
            async with bench.http.get(f"{bench.topology.gateway_url}/health?full=1") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=6000, help="length of a prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--crowd", type=int, default=16, help="prompts at once")
    parser.add_argument("--keep", type=Path, help="new folder where logs stay")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
