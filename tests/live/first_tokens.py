"""Answers through the gateway beside those of one engine that finds the prompt in its cache.

    python -m tests.live.first_tokens [--requests 1000] [--at-once 6]

Real vLLM on the CPU, over the sampling parameters with which the engine that prefills gives the
first token. The model computes in float32, in which no two tokens are nearly as likely. Prints a
row for each kind of sampling, and each answer that differs; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.deploy.topology import parts
from tests.deployments import LAPTOP, laid_out, placed, put_between, started
from tests.live.conftest import Live, document, until
from tests.live.model_kinds import KINDS, make_kind
from tests.live.relay import Relay

LETTERS = [*range(32, 58), *range(64, 90)]
"""Tokens of the letters, in a vocabulary of bytes: others are parts of a character, or mute, all
with the same logit."""
SAMPLING: list[dict[str, Any]] = [
    {},
    {"allowed_token_ids": LETTERS},
    {"allowed_token_ids": LETTERS, "max_tokens": 2},
    {"allowed_token_ids": LETTERS, "max_tokens": 1},
    {"temperature": 1.0, "top_k": 1, "allowed_token_ids": LETTERS},
    {"temperature": 1.0, "top_p": 1e-6, "allowed_token_ids": LETTERS},
    {"temperature": 1.0, "min_p": 1.0, "allowed_token_ids": LETTERS},
    {"repetition_penalty": 1.3, "allowed_token_ids": LETTERS},
    {"logit_bias": {str(token): 20 for token in LETTERS[26:]}},
    {"min_tokens": 5, "allowed_token_ids": LETTERS, "stop_token_ids": LETTERS[:26]},
    {"stop_token_ids": LETTERS, "allowed_token_ids": LETTERS},
    {"stop_token_ids": LETTERS[::3], "allowed_token_ids": LETTERS},
    {"ignore_eos": True, "allowed_token_ids": LETTERS},
    {"seed": 7, "allowed_token_ids": LETTERS},
    {"skip_special_tokens": False, "allowed_token_ids": LETTERS},
]
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.7, "min_p": 1},
]
"""Greedy, and sampled without a choice: the seam is another one."""
ENGINES = (("prfaas", "prfaas-engine"), ("pd", "pd-engine"))
FLOAT32 = ["--max-num-batched-tokens", "512", "--dtype", "float32", "--enforce-eager"]


@dataclass(frozen=True)
class Asked:
    """One request and its two answers, texts, counts and ends.

    Attributes:
        kind: Parameters of its sampling.
        body: Of the request.
        said: Through the gateway.
        expected: Of one engine.
        record: The gateway's.
        is_tie: That engine says the same as the gateway from the first token on.
    """

    kind: str
    body: dict[str, Any]
    said: dict[str, Any]
    expected: dict[str, Any]
    record: dict[str, Any]
    is_tie: bool = False

    @property
    def is_same(self) -> bool:
        """Return True if text, usage and end are the same, and the record counts the same."""
        num_tokens = self.expected["completion_tokens"]
        return self.said == self.expected and self.record["num_output_tokens"] == num_tokens


async def ask(live: Live, url: str, body: dict[str, Any], request_id: str = "x") -> dict[str, Any]:
    """An answer, streamed or not: its text, its counts and its end."""
    headers = {"X-Request-Id": request_id}
    async with live.http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        if not body["stream"]:
            answer = await reply.json()
            [choice] = answer["choices"]
            return dict(answer["usage"], text=choice["text"], **_ends(choice))
        events = [json.loads(line[6:]) async for line in reply.content if line[:7] == b"data: {"]
    assert "error" not in events[-1], events[-1]
    choices = [event["choices"][0] for event in events if event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return dict(events[-1]["usage"], text=text, **_ends(choices[-1]))


def _ends(choice: dict[str, Any]) -> dict[str, Any]:
    return {key: choice[key] for key in ("finish_reason", "stop_reason")}


async def compare(
    live: Live, draw: random.Random, extra: dict[str, Any], num_tokens: int, *, stream: bool
) -> Asked:
    """Send one request to the gateway, and to an engine that has the prompt in its cache.

    Args:
        num_tokens: Of the prompt, more than a block has.
    """
    salt = secrets.token_hex(6)
    prompt = f"{salt} " + document(num_tokens - len(salt) - 1, start=draw.randrange(5000))
    body = {"model": live.model, "prompt": prompt, "max_tokens": 8, "temperature": 0} | extra
    body["stream"] = stream
    if stream:
        body["stream_options"] = {"include_usage": True}
    engine, alone = live.topology.engines["pd-engine"], {"cache_salt": salt}
    wants_stop, start, length = draw.random() < 0.5, draw.randrange(2), draw.randrange(1, 4)
    first = await ask(live, engine, body | alone)
    # A stop string that begins anywhere: of the first token, or across the seam.
    if wants_stop and stream and len(text := first["text"]) > 2:
        body["stop"] = [text[start : start + length], text[:1] + "\0"]
    expected = await ask(live, engine, body | alone)
    assert expected.pop("prompt_tokens_details")["cached_tokens"] > 0
    request_id = f"first-{salt}"
    said = await ask(live, live.url, body, request_id)
    assert said.pop("prompt_tokens_details")["cached_tokens"] == 0
    asked = Asked(", ".join(extra), body, said, expected, await live.record(request_id))
    if said == expected or is_greedy(body):
        return asked
    return replace(asked, is_tie=await is_same_from_the_seam(live, asked, salt))


def is_greedy(body: dict[str, Any]) -> bool:
    """Return True if each token is the most likely one."""
    return body["temperature"] == 0 or body.get("top_k") == 1


async def is_same_from_the_seam(live: Live, asked: Asked, salt: str) -> bool:
    """Return True if an answer is what one engine says after its first token.

    It computes that token as a part of the prompt, in another order of additions than by itself, so
    that two tokens of nearly equal probability may swap, as after a preemption within an engine.
    """
    engine, ids = live.topology.engines["pd-engine"], list[int]()
    body, said = asked.body, asked.said
    for text in (body["prompt"], said["text"][0]):
        async with live.http.post(f"{engine}/tokenize", json={"prompt": text}) as reply:
            ids += (await reply.json())["tokens"]
    rest = body | {"prompt": ids, "max_tokens": body["max_tokens"] - 1, "cache_salt": salt}
    if "min_tokens" in body:
        rest["min_tokens"] = body["min_tokens"] - 1
    there = await ask(live, engine, rest)
    return bool(
        said["text"] == said["text"][0] + there["text"]
        and said["finish_reason"] == there["finish_reason"]
    )


def settings(more: str = "") -> str:
    """Engines that compute in float32, of which short prompts are prefilled remotely as well."""
    lines = ['[routing]\noffload_threshold = 200\ntransfer_timeout = "60s"\n' + more]
    for cluster, engine in ENGINES:
        lines.append(f"[clusters.{cluster}.engines.{engine}]\nargs = {json.dumps(FLOAT32)}")
        lines.append('kv_cache_memory = "256MiB"')
    return "\n".join(lines)


@asynccontextmanager
async def running(overlay: str, local: Path) -> AsyncIterator[Live]:
    """Start the laptop's deployment with a model of attention alone, in a folder."""
    make_kind(next(iter(KINDS)), local / "model")
    topology = await laid_out(*placed(LAPTOP, local, overlay))
    relay, stages = Relay(topology.pools["pd-pool"]), parts(topology)
    put_between(stages, "prfaas-pool", "pd-pool", await relay.start())
    try:
        async with started(stages) as supervisor, aiohttp.ClientSession() as http:
            yield Live(topology, supervisor, relay, http)
    finally:
        await relay.stop()


async def compare_all(live: Live, count: int, at_once: int) -> list[Asked]:
    """Requests of every kind and way, streamed three times of four."""
    draw, found, turns = random.Random(36), list[Asked](), iter(range(count))

    async def client() -> None:
        for number in turns:
            kind, way = SAMPLING[number % len(SAMPLING)], WAYS[number // len(SAMPLING) % len(WAYS)]
            stream = number // len(SAMPLING) // len(WAYS) % 4 != 3
            length = draw.randrange(300, 900)
            found.append(await compare(live, draw, way | kind, length, stream=stream))
            if not found[-1].is_same:
                print(f"differs: {found[-1]}", flush=True)
            if len(found) % 50 == 0:
                print(f"{len(found)} requests", file=sys.stderr, flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())

    async def is_idle() -> bool:
        return await live.metric(live.url, "prfaas_requests_in_flight") == 0

    await until(is_idle)
    return found


def table(found: list[Asked]) -> str:
    """A row for each kind of sampling, and one for all."""
    lines = ["| sampling | requests | first token from prefill | fell back | ties | differ |"]
    lines.append("|---" * 6 + "|")
    kinds = sorted({asked.kind for asked in found})
    rows = {kind: [asked for asked in found if asked.kind == kind] for kind in kinds}
    for name, each in (rows | {"all": found}).items():
        num_early = sum(asked.record["first_token_from"] == "prefill" for asked in each)
        num_back = sum(asked.record["fallback"] is not None for asked in each)
        ties = sum(asked.is_tie for asked in each)
        others = sum(not asked.is_same and not asked.is_tie for asked in each)
        lines.append(f"| {name} | {len(each)} | {num_early} | {num_back} | {ties} | {others} |")
    return "\n".join(lines)


async def measure(count: int, at_once: int) -> list[Asked]:
    """Start everything, and compare."""
    with tempfile.TemporaryDirectory(prefix="first-tokens-") as place:
        async with running(settings(), Path(place)) as live:
            return await compare_all(live, count, at_once)


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=6)
    options = parser.parse_args()
    found = asyncio.run(measure(options.requests, options.at_once))
    print(table(found))
    sys.exit(any(not asked.is_same for asked in found))


if __name__ == "__main__":
    main()
