"""The experiment of a curious tenant: which of two texts has another one sent?

Each round blue sends one of two new texts; red then times both and says that the quicker one was
sent. Whoever knows nothing is right in half of the rounds. A second red times nothing itself but is
told the CPU time that the gateway took to make each prompt: what a patient one learns on a quiet
machine.

    python -m tests.gateway.tokenization.guess_texts [ROUNDS [RUNS]]

Prints, of each kind of request, how often both were right in each run, and how likely it is that
who guesses is right so often or more in all runs together.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway.prompts import make_checkpoint
from prfaas.engines.checkpoint import make_tokenizer
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from prfaas.wire.identity import make_authority, make_identity
from tests.gateway.conftest import World, running, until

TEXT_CHARS = 60_000
KEYS = {name: new_key() for name in ("blue", "red")}
Ask = Callable[[World, str, str], Awaitable[None]]


def new_text(rng: random.Random) -> str:
    """Words that no vocabulary has."""
    words = ["".join(rng.choices("etaoinshrdlucmwfgyp", k=rng.randint(3, 12))) for _ in range(9000)]
    return " ".join(words)[:TEXT_CHARS]


async def _post(world: World, tenant: str, path: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    async with world.http.post(f"{world.url}{path}", json=body, headers=headers) as response:
        await response.read()


async def tokenize(world: World, tenant: str, text: str) -> None:
    await _post(world, tenant, "/tokenize", {"prompt": text})


async def tokenize_chat(world: World, tenant: str, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    await _post(world, tenant, "/tokenize", {"messages": messages})


async def complete(world: World, tenant: str, text: str) -> None:
    await _post(world, tenant, "/v1/completions", {"prompt": text, "max_tokens": 1})


async def refused(world: World, tenant: str, text: str) -> None:
    """It is tokenised, and then too long with what is to be answered."""
    await _post(world, tenant, "/v1/completions", {"prompt": text, "max_tokens": 250_000})


class CpuTimes:
    """CPU time of the thread that makes each prompt, noted in the gateway."""

    def __init__(self, prompts: Any) -> None:
        self.last_s = 0.0
        make = prompts._make

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return make(*args)
            finally:
                self.last_s = time.thread_time() - start

        prompts._make = timed


@dataclass
class Found:
    """Findings of both attackers in all runs.

    Attributes:
        right: How often each was right, by run: by the clock, by CPU time.
        known: CPU times of the texts that were sent, seconds.
        unknown: CPU times of the others.
    """

    right: list[tuple[int, int]] = field(default_factory=list)
    known: list[float] = field(default_factory=list)
    unknown: list[float] = field(default_factory=list)

    def line(self, num_rounds: int) -> str:
        """As a row of a table."""
        cells = []
        for judge in (0, 1):
            counts = [right[judge] for right in self.right]
            num_tried = num_rounds * len(counts)
            chance = at_least(sum(counts), num_tried)
            each = " ".join(map(str, counts))
            cells.append(f"{each}: {sum(counts)} of {num_tried} ({chance:.0%})")
        times = f"{median(self.known) * 1e3:.1f} / {median(self.unknown) * 1e3:.1f} ms"
        return " | ".join([*cells, times])


def at_least(num_right: int, num_tried: int) -> float:
    """The chance of being right so often or more by tossing a coin."""
    num_ways = sum(comb(num_tried, k) for k in range(num_right, num_tried + 1))
    return num_ways / (1 << num_tried)


async def play(
    world: World, ask: Ask, num_rounds: int, seed: int, cpu: CpuTimes, found: Found
) -> None:
    """One run."""
    rng = random.Random(f"{ask.__name__} {seed}")
    right = [0, 0]
    for _ in range(num_rounds):
        texts = [new_text(rng), new_text(rng)]
        sent, first = rng.randrange(2), rng.randrange(2)
        await ask(world, "blue", texts[sent])
        by_clock, by_cpu = [0.0, 0.0], [0.0, 0.0]
        for which in (first, 1 - first):
            start = time.perf_counter()
            await ask(world, "red", texts[which])
            by_clock[which] = time.perf_counter() - start
            by_cpu[which] = cpu.last_s
        for judge, took in enumerate((by_clock, by_cpu)):
            right[judge] += took.index(min(took)) == sent
        found.known.append(by_cpu[sent])
        found.unknown.append(by_cpu[1 - sent])
    found.right.append((right[0], right[1]))


async def lengthen(world: World) -> None:
    """Have the engine come back with room for the texts: its length is read when it comes."""
    engine = world.gateway.engines.by_name["decode"]
    world.decode.healthy = False
    await until(lambda: not engine.is_ready)
    world.decode.max_model_len, world.decode.healthy = 200_000, True
    await until(lambda: engine.is_ready)


async def main(num_rounds: int = 60, num_runs: int = 1) -> None:
    with tempfile.TemporaryDirectory() as place:
        identities = Path(place) / "identities"
        identities.mkdir()
        make_authority(identities)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(identities, name)
        bytes_alone, words = Path(place) / "bytes", Path(place) / "words"
        bytes_alone.mkdir()
        make_tokenizer(bytes_alone)
        (bytes_alone / "config.json").write_text(json.dumps({"vocab_size": 512}))
        words.mkdir()
        make_checkpoint(words)
        tables = {name: {"keys": [key_hash(key)]} for name, key in KEYS.items()}
        for checkpoint in (words, bytes_alone):
            state = Path(place) / f"state-{checkpoint.name}"
            async with running(checkpoint, identities, state, tenants=tables) as world:
                await lengthen(world)
                cpu = CpuTimes(world.gateway._prompts)
                for ask in (tokenize, tokenize_chat, complete, refused):
                    for tenant in KEYS:
                        await ask(world, tenant, new_text(random.Random(tenant)))
                    found = Found()
                    for seed in range(num_runs):
                        await play(world, ask, num_rounds, seed, cpu, found)
                    line = found.line(num_rounds)
                    print(f"| {checkpoint.name}, {ask.__name__} | {line} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
