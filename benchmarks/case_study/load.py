"""The load generator: runs beside the gateway, answers are checked token by token.

python -m benchmarks.case_study.load URL MODEL TOKENIZER < requests.json
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass

import aiohttp
import numpy as np

from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.blocks import DrawnAnswer

TOKENS = 256
"""Of the tokenizer, that prompts are made of."""


@dataclass
class Ask:
    at: float
    body: bytes
    expected: str


def prepare(spec: dict[str, object], model: str, vocabulary: Vocabulary) -> list[Ask]:
    rng, asks = np.random.default_rng(7), []
    for at, length, outputs in spec["requests"]:  # type: ignore[attr-defined]
        prompt = rng.integers(0, TOKENS, length).tolist()
        answer = DrawnAnswer(prompt)
        expected = "".join(vocabulary.texts[answer.next(vocabulary.spoken)] for _ in range(outputs))
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": outputs,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        asks.append(Ask(at, json.dumps(body, separators=(",", ":")).encode(), expected))
    return asks


async def one(http: aiohttp.ClientSession, url: str, ask: Ask, start: float) -> dict[str, object]:
    await asyncio.sleep(max(start + ask.at - time.monotonic(), 0))
    found: dict[str, object] = {"at": ask.at, "first": None, "error": "", "path": ""}
    found["late"] = time.monotonic() - start - ask.at
    text: list[str] = []
    try:
        headers = {"Content-Type": "application/json"}
        async with http.post(f"{url}/v1/completions", data=ask.body, headers=headers) as reply:
            if reply.status != 200:
                found["error"] = f"status {reply.status}: {(await reply.text())[:200]}"
                return found
            found["path"] = reply.headers.get("X-Prfaas-Path", "")
            async for raw in reply.content:
                line = raw.strip()
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    found["error"] = str(chunk["error"])[:200]
                    return found
                for choice in chunk["choices"]:
                    if found["first"] is None:
                        found["first"] = time.monotonic() - start
                    text.append(choice["text"])
            if "".join(text) != ask.expected:
                found["error"] = "wrong answer"
            else:
                found["done"] = time.monotonic() - start
    except asyncio.CancelledError:
        if not ask.expected.startswith("".join(text)):
            found["error"] = "wrong answer"
    except aiohttp.ClientError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


async def ready(http: aiohttp.ClientSession, url: str, limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            try:
                async with http.get(f"{url}/health?full=1") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


async def metric(http: aiohttp.ClientSession, engines: list[str], name: str) -> list[float]:
    """A metric of timing engines."""
    values = []
    for engine in engines:
        async with http.get(f"{engine}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        found = [line for line in lines if line.startswith(f"timing:{name}{{")]
        values += [float(line.rpartition(" ")[2]) for line in found]
    return values


async def steps(http: aiohttp.ClientSession, engines: list[str]) -> tuple[float, float]:
    """Steps of engines so far, and by how much they were late in all, s."""
    late = await metric(http, engines, "late_step_seconds_total")
    return sum(await metric(http, engines, "steps_total")), sum(late)


async def warm_up(
    http: aiohttp.ClientSession, url: str, model: str, waves: list[list[int]]
) -> None:
    """Have prompts prefilled, each wave at a time; those of the last wave are decoded as well."""
    rng = np.random.default_rng(5)

    async def ask(length: int, num_tokens: int) -> None:
        prompt = rng.integers(0, TOKENS, length).tolist()
        body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
        async with http.post(
            f"{url}/v1/completions", json=body | {"temperature": 0, "stream": True}
        ) as reply:
            await reply.read()

    for number, lengths in enumerate(waves, 1):
        await asyncio.gather(*(ask(length, 1 + (number == len(waves))) for length in lengths))


async def relayed(http: aiohttp.ClientSession, url: str, count: int) -> list[int]:
    """Tokens of relay decode of the last requests, in order of their arrival."""
    async with http.get(f"{url}/control/requests", params={"limit": count}) as reply:
        records = (await reply.json())["requests"]
    return [each["relayed_tokens"] for each in sorted(records, key=lambda r: r["started_at"])]


async def main() -> None:
    url, model, tokenizer = sys.argv[1:4]
    spec = json.load(sys.stdin)
    asks = await asyncio.to_thread(prepare, spec, model, Vocabulary(tokenizer))
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        await ready(http, url, limit_s=300)
        await warm_up(http, url, model, spec["warm"])
        stepped = await steps(http, spec["engines"])
        busy, start = cpu(), time.monotonic()
        print("begins", flush=True)
        tasks = [asyncio.create_task(one(http, url, ask, start)) for ask in asks]
        _, left = await asyncio.wait(tasks, timeout=spec["end"])
        used = [b - a for a, b in zip(busy, cpu(), strict=True)]
        for task in left:
            task.cancel()
        outcomes = await asyncio.gather(*tasks)
        after = await steps(http, spec["engines"])
        count, late_s = (b - a for a, b in zip(stepped, after, strict=True))
        made = await relayed(http, url, len(asks))
        for found, num_tokens in zip(outcomes, made, strict=False):
            found["relayed"] = num_tokens
        report = {
            "outcomes": outcomes,
            "behind": max(await metric(http, spec["engines"], "behind_profile_seconds")),
            "lag": late_s / max(count, 1),
            "busy_ratio": 1 - used[1] / sum(used),
        }
    json.dump(report, sys.stdout)


def cpu() -> tuple[int, int]:
    """Ticks of all cores so far: busy, and idle."""
    with open("/proc/stat") as file:  # noqa: PTH123
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, idle


if __name__ == "__main__":
    asyncio.run(main())
