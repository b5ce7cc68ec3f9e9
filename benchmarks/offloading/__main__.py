"""CPU time and throughput of prompts that another engine prefilled, beside prefilling them alone.

    python -m benchmarks.offloading [--tokens 6000] [--rounds 2] [--crowd 16] [--one-engine]
    python -m benchmarks.offloading --apart
    python -m benchmarks.offloading.decode_speed

Starts the laptop example: two engines on the same two cores. Sends three prompts one by one, a
crowd at once, and a mixed crowd: through a gateway that offloads all long ones, through one with
the policy `observed`, and to the PD engine by itself. With `--one-engine`, then also to that engine
without any PrfaaS cluster and gateway beside it. With `--apart` each engine has one core, and the
second gateway has learnt from first tokens. Prints tables in Markdown.
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

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.deployment import Deployment
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started

from .cpu_time import all_cpu_seconds

OUTPUT_TOKENS = 8
ONE_BY_ONE = 3
OFFLOADED, OBSERVED = "offloaded (`paper`)", "`observed`"
ALONE, WHOLE = "PD engine alone", "one engine, nothing beside it"
APART = """
[clusters.prfaas.engines.prfaas-engine]
cpus = "0"
[clusters.pd.engines.pd-engine]
cpus = "1"
"""
PD_ENGINE, PD_POOL = "pd-engine", "pd-pool"
SHORT_TOKENS, SHORT_RATIO = 300, 2
"""Of the short prompts of a mix, and how many there are to a long one."""
NUM_LEARNT = 10
"""Prompts of either kind from which a gateway learns."""


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
    urls: dict[str, str]
    number: int = 0

    async def measure(self, how: str, lengths: list[int], width: int) -> Measured:
        """Send prompts that nobody has seen, so many at a time."""
        url = self.urls[how]
        prompts = [self._prompt(num_tokens) for num_tokens in lengths]
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
        body["stream"] = True
        async with gate, self.http.post(f"{url}/v1/completions", json=body) as reply:
            answer = await reply.text()
            if reply.status != 200 or "error" in answer:
                raise SystemExit(f"{url} answers {reply.status}: {answer}")
            return reply.headers.get("X-Prfaas-Path", "direct")

    async def teach(self, how: str, num_tokens: int) -> None:
        """Let a gateway see first tokens on both paths."""
        await self.measure(how, [num_tokens, SHORT_TOKENS] * NUM_LEARNT, 1)


def table(title: str, rows: dict[str, list[Measured]]) -> str:
    """Medians of all rounds."""
    lines = [
        f"| {title} | time, s | CPU of the PD engine, s | of all parts, s | offloaded |",
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
    return "\n".join(lines)


def crowds(options: argparse.Namespace) -> list[tuple[str, list[int], int]]:
    """Title, lengths, and how many are under way at a time."""
    long, crowd = options.tokens, options.crowd
    mix = [long] * (crowd // 2) + [SHORT_TOKENS] * (SHORT_RATIO * crowd)
    # Short ones come between the long ones.
    mix = [mix[place * 7 % len(mix)] for place in range(len(mix))] if len(mix) % 7 else mix
    return [
        ("three, one by one", [long] * ONE_BY_ONE, 1),
        (f"{crowd} at once", [long] * crowd, crowd),
        (f"{len(mix)} at once, {crowd // 2} of them long", mix, len(mix)),
    ]


Found = dict[str, dict[str, list[Measured]]]


async def measure_all(bench: Bench, options: argparse.Namespace, found: Found) -> None:
    """All crowds in all ways, round by round."""
    for how in bench.urls:
        await bench.measure(how, [options.tokens], 1)
    for title, lengths, width in crowds(options):
        rows = found.setdefault(title, {})
        for _ in range(options.rounds):
            for how in bench.urls:
                rows.setdefault(how, []).append(await bench.measure(how, lengths, width))
        print(table(title, rows), end="\n\n", flush=True)


def learning(deployment: Deployment) -> Deployment:
    """The same parts behind a gateway with the policy that needs no plan."""
    routing = deployment.routing.model_copy(update={"policy": None})
    gateway = deployment.gateway.model_copy(update={"listen": "127.0.0.1:0"})
    return deployment.model_copy(update={"routing": routing, "gateway": gateway})


async def two_engines(options: argparse.Namespace, local: Path, found: Found) -> None:
    """The laptop example, and a second gateway in this process: its CPU time is not counted."""
    topology = await laid_out(*placed(LAPTOP, local, APART if options.apart else ""))
    # Engines close connections that were idle.
    once = aiohttp.TCPConnector(force_close=True)
    async with (
        started(parts(topology)) as supervisor,
        aiohttp.ClientSession(connector=once) as http,
    ):
        gateway = make_gateway(learning(topology.deployment), topology.endpoints)
        urls = {OFFLOADED: topology.gateway_url, OBSERVED: await gateway.start()}
        urls[ALONE] = topology.engines[PD_ENGINE]
        bench = Bench(topology, supervisor, http, urls)
        try:
            for url in (urls[OFFLOADED], urls[OBSERVED]):
                await until_linked(http, url)
            if options.apart:
                await bench.teach(OBSERVED, options.tokens)
            await measure_all(bench, options, found)
        finally:
            await gateway.close()


async def one_engine(options: argparse.Namespace, local: Path, found: Found) -> None:
    """The PD engine and its pool node, and nothing else."""
    topology = await laid_out(*placed(LAPTOP, local))
    kept = [[p for p in stage if p.name in (PD_ENGINE, PD_POOL)] for stage in parts(topology)]
    for part in (part for stage in kept for part in stage):
        part.whole_url = ""
    once = aiohttp.TCPConnector(force_close=True)
    async with started(kept) as supervisor, aiohttp.ClientSession(connector=once) as http:
        urls = {WHOLE: topology.engines[PD_ENGINE]}
        await measure_all(Bench(topology, supervisor, http, urls), options, found)


async def run(options: argparse.Namespace) -> None:
    """Both deployments, one after the other."""
    found: Found = {}
    with tempfile.TemporaryDirectory(prefix="offloading-") as scratch:
        local = options.keep or Path(scratch)
        for name, measure in (("two", two_engines), ("one", one_engine)):
            if name == "two" or options.one_engine:
                (local / name).mkdir(parents=True)
                await measure(options, local / name, found)


async def until_linked(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until a gateway offloads."""
    async with asyncio.timeout(60):
        while True:
            async with http.get(f"{url}/health?full=1") as reply:
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
    parser.add_argument("--one-engine", action="store_true", help="measure that, too")
    parser.add_argument("--apart", action="store_true", help="give each engine one core")
    parser.add_argument("--keep", type=Path, help="new folder where logs stay")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
