"""The experiment of a curious tenant: which of two texts has another one sent?

Each round blue sends one of two new texts; red then times both and says that the quicker one was
sent. Whoever knows nothing is right in half of the rounds. A second red times nothing itself but is
told the CPU time that the gateway took to make each prompt: what a patient one learns on a quiet
machine.

    python -m tests.gateway.tokenization.guess_texts [ROUNDS]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway.prompts import make_checkpoint
from prfaas.engines.checkpoint import make_tokenizer
from prfaas.gateway.keys import key_hash, new_key
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


async def play(world: World, ask: Ask, num_rounds: int) -> str:
    """How often each red was right, and the median CPU time for the text sent and the other one."""
    rng, cpu = random.Random(f"{ask.__name__} {num_rounds}"), CpuTimes(world.gateway._prompts)
    right = [0, 0]
    known: list[float] = []
    unknown: list[float] = []
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
        known.append(by_cpu[sent])
        unknown.append(by_cpu[1 - sent])
    return (
        f"right {right[0]:2} of {num_rounds} by the clock, {right[1]:2} by CPU time: "
        f"{median(known) * 1e3:5.1f} ms for the text sent, {median(unknown) * 1e3:5.1f} ms for "
        "the other"
    )


async def lengthen(world: World) -> None:
    """Have the engine come back with room for the texts: its length is read when it comes."""
    engine = world.gateway.engines.by_name["decode"]
    world.decode.healthy = False
    await until(lambda: not engine.is_ready)
    world.decode.max_model_len, world.decode.healthy = 200_000, True
    await until(lambda: engine.is_ready)


async def main(num_rounds: int) -> None:
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
                for ask in (tokenize, tokenize_chat, complete, refused):
                    for tenant in KEYS:
                        await ask(world, tenant, new_text(random.Random(tenant)))
                    line = await play(world, ask, num_rounds)
                    print(f"{checkpoint.name:6} {ask.__name__:14} {line}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
