"""The load: each request comes at its time, and its answer is compared token by token."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import aiohttp
import numpy as np

from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.blocks import DrawnAnswer
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S

from .outcome import WRONG, Outcome

TOKENS = 256
"""Of the tokenizer, that prompts are made of."""


@dataclass(frozen=True)
class Ask:
    """A request as it is sent, and its answer as it has to be."""

    at: float
    num_output: int
    body: bytes
    expected: str


def prepare(asked: list[Request], model: str, vocabulary: Vocabulary) -> list[Ask]:
    """Every prompt is another one: no cache holds any of it."""
    rng, asks = np.random.default_rng(7), []
    for request in asked:
        prompt = rng.integers(0, TOKENS, request.num_prompt_tokens).tolist()
        answer, count = DrawnAnswer(prompt), request.num_output_tokens
        words = [vocabulary.texts[answer.next(vocabulary.spoken)] for _ in range(count)]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": count,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        asks.append(Ask(request.arrived_at_ns / NS_PER_S, count, data, "".join(words)))
    return asks


async def drive(url: str, asks: list[Ask], start: float) -> list[Outcome]:
    """Send everything, and wait for all answers; `start` is of the monotonic clock."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        return await asyncio.gather(*(one(http, url, ask, start) for ask in asks))


async def one(http: aiohttp.ClientSession, url: str, ask: Ask, start: float) -> Outcome:
    """Send a request at its time; `start` is of the monotonic clock."""
    await asyncio.sleep(max(start + ask.at - time.monotonic(), 0))
    first, text, path, error = None, list[str](), "", ""
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(f"{url}/v1/completions", data=ask.body, headers=headers) as reply:
            path = reply.headers.get("X-Prfaas-Path", "")
            if reply.status != 200:
                error = f"status {reply.status}: {(await reply.text())[:200]}"
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    first = first or time.monotonic() - start
                    error = error or str(chunk.get("error", ""))[:200]
                    text += [choice["text"] for choice in chunk.get("choices", ())]
    except aiohttp.ClientError as broken:
        error = f"{type(broken).__name__}: {broken}"
    if not error and "".join(text) != ask.expected:
        error = WRONG
    ended = time.monotonic() - start
    return Outcome(ask.at, first, ended, ask.num_output, remote=path == "remote", error=error)
