"""Decode speed of an engine whose worker sleeps between steps, beside one whose worker polls.

    python -m benchmarks.offloading.decode_speed [--rounds 7] [--output 200]

Two vLLM engines on the CPU, one core each: one with prfaas, whose CPU workers sleep when idle, and
one of plain vLLM, whose workers poll for a second after each step. Each decodes alone, in turns;
then the engines change cores. Prints the median times and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.engines.launch import Command
from tests.deployments import LAPTOP, laid_out, placed, started

PD_ENGINE, PD_POOL, OTHER = "pd-engine", "pd-pool", "prfaas-engine"
PROMPT = "Say it again, in other words. "


def plain(part: ProcessPart) -> ProcessPart:
    """The same engine without prfaas."""
    made, args = copy.copy(part), list(part.command.args)
    for option in ("--kv-transfer-config", "--middleware"):
        at = args.index(option)
        del args[at : at + 2]
    made.command, made.warm_up = Command(args, part.command.env), None
    return made


async def decode_s(
    http: aiohttp.ClientSession, topology: Topology, name: str, length: int
) -> float:
    """Time from the first token to the last one, seconds."""
    body = {"model": topology.deployment.model.name, "prompt": PROMPT, "max_tokens": length}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    came: list[float] = []
    async with http.post(f"{topology.engines[name]}/v1/completions", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                came.append(time.monotonic())
    return came[-1] - came[0]


async def measure(cores: tuple[str, str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Both engines in turns; cores of the one with prfaas and of the plain one."""
    found: dict[str, list[float]] = {PD_ENGINE: [], OTHER: []}
    with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
        where = f'[clusters.pd.engines.{PD_ENGINE}]\ncpus = "{cores[0]}"\n'
        where += f'[clusters.prfaas.engines.{OTHER}]\ncpus = "{cores[1]}"\n'
        topology = await laid_out(*placed(LAPTOP, Path(scratch), where))
        by_name = {part.name: part for stage in parts(topology) for part in stage}
        kept = [by_name[PD_POOL], by_name[PD_ENGINE], plain(by_name[OTHER])]
        for part in kept:
            part.whole_url = ""
        once = aiohttp.TCPConnector(force_close=True)
        stages = [kept[:1], kept[1:]]
        async with started(stages), aiohttp.ClientSession(connector=once) as http:
            for name in found:
                await decode_s(http, topology, name, options.output)
            for _ in range(options.rounds):
                for name, times in found.items():
                    times.append(await decode_s(http, topology, name, options.output))
    return found


async def run(options: argparse.Namespace) -> None:
    print(f"| cores | prfaas, s for {options.output} tokens | plain vLLM, s | ratio |")
    print("|---|---|---|---|")
    for cores in (("1", "0"), ("0", "1"))[: 1 if options.once else 2]:
        found = await measure(cores, options)
        ours, theirs = (statistics.median(found[name]) for name in (PD_ENGINE, OTHER))
        shown = f"{ours:.3f} | {theirs:.3f} | {ours / theirs:.2f}"
        print(f"| {cores[0]}, {cores[1]} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=int, default=200, help="tokens to decode")
    parser.add_argument("--once", action="store_true", help="do not change cores")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
