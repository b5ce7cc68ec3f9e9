"""A tenant that takes all it can get beside one that asks for five tokens, with timing engines.

    python -m tests.drill.shares               as it is
    python -m tests.drill.shares --not-held    everything goes to the engines at once, as before

Red sends 1,080 sequences (135 prompts times 8 answers of 64 tokens) in 27 requests at once;
meanwhile blue sends requests of five tokens, one after the other. Then red leaves an unstreamed
answer with `n = 64` in the middle. At last green has text tokenised for nothing.
"""

import argparse
import asyncio
import random
import re
import tempfile
import time
from pathlib import Path
from statistics import median

import aiohttp

from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.gateway.tenancy.tenants import key_hash, new_key

from .site import DECODE, ENGINE, MODEL, PREFILL, write_files
from .streams import Streams, streaming

KEYS = {name: new_key() for name in ("red", "blue", "green")}
SLOTS_EACH = 64
"""As many as the plan's decode table has."""
NOT_HELD = 1_000_000
N, PROMPTS, NUM_WIDE = 8, 5, 27
OUTPUT_TOKENS = 64
BUDGETS = {"red": 90_000, "blue": 90_000, "green": 400_000}
"""Tokens a minute: nobody is without, and red and green never have all of them again."""
TEXT = "0123456789" * 20_000
"""Digits take a tokenizer longest; 200 KB fit into a model of 200,000 tokens."""
TEXTS = 12
GENERATED = re.compile(r"^vllm:generation_tokens_total\{.*\} (.*)$", re.MULTILINE)


def file_in(local: Path, slots_each: int) -> Path:
    """The drill's deployment with two tenants."""
    file = write_files(local, PREFILL)
    text = file.read_text().replace("max_model_len = 16384", "max_model_len = 260000")
    for name in DECODE:
        engine = ENGINE.format(cluster="pd", name=name)
        text = text.replace(engine, f"{engine}sequences_max = {slots_each}\n")
    for name, key in KEYS.items():
        text += (
            f'[tenants.{name}]\nkeys = ["{key_hash(key)}"]\ntokens_per_minute = {BUDGETS[name]}\n'
        )
    file.write_text(text)
    return file


class Tenants:
    """Requests of red and blue."""

    def __init__(self, streams: Streams) -> None:
        self.url, self.http = streams.url, streams.http
        self.left: dict[str, int] = {}
        self.left_at_s: dict[str, float] = {}

    async def post(self, name: str, path: str, body: dict[str, object]) -> int:
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        body = {"model": MODEL, **body}
        async with self.http.post(self.url + path, json=body, headers=headers) as reply:
            await reply.read()
            self.left[name] = int(reply.headers["x-ratelimit-remaining-tokens"])
            self.left_at_s[name] = time.monotonic()
            return reply.status

    async def charged(self, name: str, since: tuple[int, float]) -> int:
        """Tokens that a tenant was charged since `mark`."""
        left, at_s = await self.mark(name)
        return round(since[0] - left + BUDGETS[name] / 60 * (at_s - since[1]))

    async def mark(self, name: str) -> tuple[int, float]:
        """Remaining tokens of a tenant, with the time."""
        await self.post(name, "/tokenize", {"prompt": "a"})
        return self.left[name], self.left_at_s[name]

    async def first_token_s(self, prompt: list[int]) -> float:
        """Blue's time to first token."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 5, "stream": True}
        headers = {"Authorization": f"Bearer {KEYS['blue']}"}
        start, first = time.monotonic(), 0.0
        url = f"{self.url}/v1/completions"
        async with self.http.post(url, json=body, headers=headers) as reply:
            async for line in reply.content:
                if not first and line.startswith(b"data: {"):
                    first = time.monotonic() - start
        return first

    async def output_tokens(self, engines: dict[str, str]) -> int:
        """Tokens that engines have made."""
        total = 0.0
        for url in engines.values():
            async with self.http.get(f"{url}/metrics") as reply:
                total += sum(map(float, GENERATED.findall(await reply.text())))
        return round(total)


async def crowd(tenants: Tenants, ids: list[int]) -> list[str]:
    """Red's sequences, and blue's requests meanwhile."""
    chance = random.Random(1)
    idle = [await tenants.first_token_s(chance.choices(ids, k=5)) for _ in range(10)]
    body: dict[str, object] = {"n": N, "max_tokens": OUTPUT_TOKENS, "temperature": 1.0}
    start = time.monotonic()
    wide = [
        asyncio.create_task(
            tenants.post(
                "red",
                "/v1/completions",
                {**body, "prompt": [chance.choices(ids, k=40) for _ in range(PROMPTS)]},
            )
        )
        for _ in range(NUM_WIDE)
    ]
    busy: list[float] = []
    while not all(task.done() for task in wide):
        await asyncio.sleep(0.2)
        busy.append(await tenants.first_token_s(chance.choices(ids, k=5)))
    took_s = time.monotonic() - start
    statuses = sorted(task.result() for task in wide)
    assert statuses == [200] * NUM_WIDE, statuses
    return [
        f"| red's {NUM_WIDE * PROMPTS * N} sequences | {took_s:.1f} s |",
        f"| blue's first token, red idle | {median(idle):.3f} s |",
        f"| blue's first token beside red: first, median, worst | {busy[0]:.2f}, "
        f"{median(busy):.2f}, {max(busy):.2f} s |",
        f"| worst, times idle | {max(busy) / median(idle):.0f} |",
    ]


async def abandoned(tenants: Tenants, ids: list[int], engines: dict[str, str]) -> list[str]:
    """Charge of an answer that its client abandons, and the tokens that engines computed for it."""
    made, since = await tenants.output_tokens(engines), await tenants.mark("red")
    prompt = random.Random(2).choices(ids, k=50)
    body: dict[str, object] = {"prompt": prompt, "n": 64, "max_tokens": 1000}
    asking = asyncio.create_task(tenants.post("red", "/v1/completions", body))
    await asyncio.sleep(2.0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(1.0)
    charged = await tenants.charged("red", since)
    made = await tenants.output_tokens(engines) - made
    return [f"| left after 2 s, n = 64: tokens made, charged | {made:,}, {charged:,} |"]


async def tokenising(tenants: Tenants) -> list[str]:
    """Text that green has tokenised for nothing, and what blue waits meanwhile."""
    prompt = {"prompt": "hello world " * 800}

    async def blue_s() -> float:
        start = time.monotonic()
        assert await tenants.post("blue", "/tokenize", dict(prompt)) == 200
        return time.monotonic() - start

    idle = [await blue_s() for _ in range(10)]
    await tenants.post("green", "/tokenize", {"prompt": TEXT})
    since = await tenants.mark("green")
    texts = [
        asyncio.create_task(tenants.post("green", "/tokenize", {"prompt": f"{number}{TEXT}"}))
        for number in range(TEXTS)
    ]
    await asyncio.sleep(0.2)
    for task in texts[: TEXTS // 2]:
        task.cancel()  # Some have begun: they are charged all the same.
    busy = [await blue_s() for _ in range(10)]
    await asyncio.gather(*texts, return_exceptions=True)
    charged = await tenants.charged("green", since)
    return [
        f"| blue's 10 KB, green idle; beside {TEXTS} texts of 200 KB of digits, half of them left "
        f"| {median(idle) * 1e3:.0f} ms; median {median(busy) * 1e3:.0f}, worst "
        f"{max(busy) * 1e3:.0f} ms |",
        f"| charged to green for them | {charged:,} tokens |",
    ]


async def drill(local: Path, slots_each: int) -> None:
    """Print the rows of a table."""
    async with streaming(file_in(local, slots_each)) as (streams, _):
        ids = Vocabulary(str(streams_model(local))).spoken
        tenants = Tenants(streams)
        for line in await crowd(tenants, ids):
            print(line, flush=True)
        engines = {name: streams.engines[name] for name in DECODE}
        for line in await abandoned(tenants, ids, engines):
            print(line, flush=True)
        for line in await tokenising(tenants):
            print(line, flush=True)


def streams_model(local: Path) -> Path:
    """Checkpoint directory of the drill."""
    return local / "model"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--not-held", action="store_true")
    slots = NOT_HELD if parser.parse_args().not_held else SLOTS_EACH
    with tempfile.TemporaryDirectory() as scratch:
        try:
            asyncio.run(drill(Path(scratch), slots))
        except aiohttp.ClientError as error:
            raise SystemExit(f"the gateway does not answer: {error}") from None
