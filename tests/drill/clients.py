"""Clients under way at a steady rate: each knows what its answer has to be, and two gateways."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.blocks import DrawnAnswer

from .load import NUM_PREFIXES, PREFIX_TOKENS, lengths
from .site import MODEL

TRIES_MAX = 6
RETRY_S = 0.1
LIMIT_S = 60.0


@dataclass
class Call:
    """One request, as its client saw it. Instants in seconds of the monotonic clock.

    Attributes:
        began_at_s: When it was first sent.
        ended_at_s: When its answer was complete.
        tries: How often it was sent, to one gateway or the other.
        wait_s: Until the first token.
        gap_s: Longest time between two events after that.
        problem: What was wrong; empty when nothing was.
        is_wrong: Whether the answer was another than it has to be.
        request_id: Of the last try.
    """

    began_at_s: float
    ended_at_s: float = 0.0
    tries: int = 0
    wait_s: float = 0.0
    gap_s: float = 0.0
    problem: str = ""
    is_wrong: bool = False
    request_id: str = ""


class GatewayGoneError(Exception):
    """A gateway took no connection, broke one, or said that it stops: the other one is asked."""


@dataclass
class Clients:
    """Send requests, and check the answers.

    Attributes:
        gateways: Base URLs.
        model: Checkpoint directory: its tokenizer says what answers have to be.
        seed: Of prompts and lengths.
        calls: All requests so far.
    """

    gateways: list[str]
    model: Path
    seed: int = 1
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._vocabulary = Vocabulary(str(self.model))
        self.begin(self.seed)
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, seed: int) -> None:
        """Send the requests of a seed from now on."""
        self._load = lengths(seed)

    async def run(self, per_s: float) -> None:
        """Send so many requests a second, until cancelled."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            due = time.monotonic()
            try:
                while True:
                    task = asyncio.create_task(self._one(http, len(self.calls)))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    due += 1 / per_s
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
            finally:
                await asyncio.gather(*self._tasks)

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(self._vocabulary.spoken, k=count)

    def _expected(self, prompt: list[int], num_tokens: int) -> str:
        answer = DrawnAnswer(prompt)
        tokens = [answer.next(self._vocabulary.spoken) for _ in range(num_tokens)]
        return "".join(self._vocabulary.texts[token] for token in tokens)

    async def _one(self, http: aiohttp.ClientSession, number: int) -> None:
        num_own, prefix, num_tokens = next(self._load)
        prompt = ([] if prefix is None else self._prefixes[prefix]) + self._tokens(num_own)
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        call = Call(time.monotonic())
        self.calls.append(call)
        try:
            async with asyncio.timeout(LIMIT_S):
                text, usage = await self._answer(http, call, number, body)
        except (RuntimeError, TimeoutError) as error:
            call.problem = str(error) or f"no answer within {LIMIT_S:.0f} s"
        else:
            counted = usage.get("prompt_tokens"), usage.get("completion_tokens")
            call.is_wrong = text != self._expected(prompt, num_tokens)
            if call.is_wrong:
                call.problem = f"wrong answer of {len(text)} characters"
            elif counted != (len(prompt), num_tokens):
                call.problem = f"usage says {counted}, not {(len(prompt), num_tokens)}"
        call.ended_at_s = time.monotonic()

    async def _answer(
        self, http: aiohttp.ClientSession, call: Call, number: int, body: dict[str, object]
    ) -> tuple[str, dict[str, int]]:
        while True:
            url = self.gateways[(number + call.tries) % len(self.gateways)]
            call.tries += 1
            call.request_id = f"drill-{self.seed}-{number}-{call.tries}"
            try:
                return await self._try(http, call, url, body)
            except GatewayGoneError:
                if call.tries == TRIES_MAX:
                    raise RuntimeError(f"no gateway after {TRIES_MAX} tries") from None
                await asyncio.sleep(RETRY_S)

    async def _try(
        self, http: aiohttp.ClientSession, call: Call, url: str, body: dict[str, object]
    ) -> tuple[str, dict[str, int]]:
        text, usage, is_done, last_s = "", dict[str, int](), False, call.began_at_s
        headers = {"X-Request-Id": call.request_id}
        call.wait_s = call.gap_s = 0.0
        try:
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                if reply.status == 503 and reply.headers.get("Connection") == "close":
                    raise GatewayGoneError
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {(await reply.text())[:200]}")
                async for line in reply.content:
                    if not line.startswith(b"data: "):
                        continue
                    now_s = time.monotonic()
                    if call.wait_s:
                        call.gap_s = max(call.gap_s, now_s - last_s)
                    call.wait_s, last_s = call.wait_s or now_s - call.began_at_s, now_s
                    if line.startswith(b"data: [DONE]"):
                        is_done = True
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RuntimeError(f"error in the stream: {chunk['error']['message']}")
                    for choice in chunk["choices"]:
                        text += choice["text"]
                    usage = chunk.get("usage") or usage
        except aiohttp.ClientError:
            raise GatewayGoneError from None
        if not is_done:
            raise RuntimeError("the stream ended without its end mark")
        return text, usage
