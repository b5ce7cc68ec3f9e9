"""Time from the start of a gateway's process to the first 200 of its readiness.

    python -m benchmarks.gateway.ready [--turns 5] [--vocabulary 150000] [--workers 1]

Pool nodes and an engine run already. A first start, which makes the bytecode, is not counted. The
vocabulary is byte-level BPE over made-up words, with the rule for words of a large model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import parts
from prfaas.cli.host.processes import ProcessPart
from tests.deployments import started

from .load import cpu_s
from .prompts import make_checkpoint
from .systems import bare_engine, children, laid

LOOK_S = 0.005


def widen(checkpoint: Path, vocabulary: int) -> None:
    """Give a checkpoint so many tokens: pairs of those that it has, each made by one merge."""
    file = checkpoint / "tokenizer.json"
    known = json.loads(file.read_text())
    tokens, merges, added = (*map(known["model"].get, ("vocab", "merges")), known["added_tokens"])
    pieces, draw = list(tokens), random.Random(0)
    while len(tokens) + len(added) < vocabulary:
        left, right = draw.choices(pieces, k=2)
        if left + right not in tokens:
            tokens[left + right] = len(tokens)
            merges.append([left, right])
    for number, token in enumerate(added, len(tokens)):
        token["id"] = number
    file.write_text(json.dumps(known, ensure_ascii=False))


async def until_ready(http: aiohttp.ClientSession, gateway: ProcessPart) -> tuple[float, float]:
    """Start a gateway; seconds until it is ready, and those of CPU of all its processes."""
    began = time.perf_counter()
    gateway.start()
    while True:
        try:
            async with http.get(gateway.health_url) as response:
                if response.status == 200:
                    break
        except aiohttp.ClientError:
            await asyncio.sleep(LOOK_S)
    passed = time.perf_counter() - began
    return passed, cpu_s([gateway.pid, *children(gateway.pid)]) if gateway.pid else 0.0


async def run(local: Path, turns: int, vocabulary: int, workers: int) -> None:
    """Measure in turns."""
    make_checkpoint(local / "model")
    widen(local / "model", vocabulary)
    async with (
        bare_engine("answer") as url,
        aiohttp.ClientSession() as http,
        AsyncExitStack() as stack,
    ):
        pools, [gateway] = parts(await laid(local, {}, url, workers))
        # As installed packages have theirs.
        gateway.command.env.pop("PYTHONDONTWRITEBYTECODE", None)
        gateway.command.env["PYTHONPYCACHEPREFIX"] = str(local / "bytecode")
        await stack.enter_async_context(started([pools]))
        found = []
        for _ in range(1 + turns):
            found.append(await until_ready(http, gateway))
            print("{:.2f} s, {:.2f} s of CPU".format(*found[-1]), flush=True)
            await gateway.stop(with_all=True)
    passed, cpu = (statistics.median(each) for each in zip(*found[1:], strict=True))
    print(f"ready after {passed:.2f} s, {cpu:.2f} s of CPU, with {vocabulary} tokens")


def main() -> None:
    """Print times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=150_000, help="tokens")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as local:
        asyncio.run(run(Path(local), options.turns, options.vocabulary, options.workers))


if __name__ == "__main__":
    main()
