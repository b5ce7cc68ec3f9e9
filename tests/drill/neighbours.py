"""A tenant that asks for five tokens beside one that fills batches, or sends long prompts.

    python -m tests.drill.neighbours

The deployment of `examples/timing.toml` with two tenants: engines of the paper's case study, whose
20 sequences at once only their plan tells. Red sends everything at once; meanwhile blue sends one
request after the other.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp

from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.deployments import TIMING, placed

from .streams import Streams, streaming

KEYS = {name: new_key() for name in ("red", "blue")}
MODEL = "prfaas-timing"
TIME_SCALE = 0.25
PAUSE_S = 0.3


@dataclass(frozen=True)
class Load:
    """Requests of red and of blue; lengths in tokens.

    Attributes:
        name: What red does.
        num: Requests of red.
        red: Length of its prompts, and of its answers.
        streams: Red streams.
        blue: Length of blue's prompts.
    """

    name: str
    num: int
    red: tuple[int, int]
    streams: bool = True
    blue: int = 5


LOADS = (
    Load("400 answers of 400 tokens", 400, (40, 400)),
    Load("the same, not streamed", 400, (40, 400), streams=False),
    Load("38 local prompts of 19,000", 38, (19_000, 8)),
    Load("the same, not streamed", 38, (19_000, 8), streams=False),
    Load("38 remote prompts of 60,000; blue's have 25,000", 38, (60_000, 8), blue=25_000),
)


def file_in(local: Path) -> Path:
    """The example, slower, with two tenants."""
    file, _ = placed(TIMING, local)
    text = file.read_text().replace("time_scale = 0.1", f"time_scale = {TIME_SCALE}")
    for name, key in KEYS.items():
        text += f'[tenants.{name}]\nkeys = ["{key_hash(key)}"]\n'
    file.write_text(text)
    return file


class Clients:
    """Requests of red and blue."""

    def __init__(self, streams: Streams, spoken: list[int]) -> None:
        self._url, self._http, self._spoken = f"{streams.url}/v1/completions", streams.http, spoken
        self._chance = random.Random(1)

    async def ask(self, name: str, lengths: tuple[int, int], *, streams: bool = True) -> float:
        """Send a request; seconds until its first token, or its answer if not streamed."""
        prompt = self._chance.choices(self._spoken, k=lengths[0])
        body = {"model": MODEL, "prompt": prompt, "max_tokens": lengths[1], "stream": streams}
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        start, first = time.monotonic(), 0.0
        async with self._http.post(self._url, json=body, headers=headers) as reply:
            async for line in reply.content:
                if not first and line.strip():
                    assert b'"error"' not in line, json.loads(line.removeprefix(b"data: "))
                    first = time.monotonic() - start
            assert reply.status == 200, reply.status
        return first


async def beside(clients: Clients, load: Load) -> str:
    """A row: blue alone, blue beside red, and how long red takes."""
    ask: Callable[[], Awaitable[float]] = lambda: clients.ask("blue", (load.blue, 5))  # noqa: E731
    idle = [await ask() for _ in range(5)]
    start = time.monotonic()
    red = [
        asyncio.create_task(clients.ask("red", load.red, streams=load.streams))
        for _ in range(load.num)
    ]
    await asyncio.sleep(0.1)
    busy: list[float] = []
    while not all(task.done() for task in red):
        busy.append(await ask())
        await asyncio.sleep(PAUSE_S)
    await asyncio.gather(*red)
    took_s = time.monotonic() - start
    return (
        f"| {load.name} | {median(idle):.2f} s | {busy[0]:.2f} / {median(busy):.2f} / "
        f"{max(busy):.2f} s | {took_s:.1f} s |"
    )


async def drill(local: Path) -> None:
    """Print a table."""
    async with streaming(file_in(local)) as (streams, _):
        clients = Clients(streams, Vocabulary(str(local / "model")).spoken)
        print("| red | blue alone | blue beside: first / median / worst | red |\n|---|---|---|---|")
        for load in LOADS:
            print(await beside(clients, load), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        try:
            asyncio.run(drill(Path(scratch)))
        except aiohttp.ClientError as error:
            raise SystemExit(f"the gateway does not answer: {error}") from None
