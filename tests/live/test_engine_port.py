"""The gateway beside the engine's own port: every form of a request that vLLM answers is answered.

Each form is sent to a real vLLM engine and to the gateway in front of it. Where both answer, they
give the same text, log probabilities and usage; where only the gateway refuses, it names the
setting that would allow the field. `python -m tests.live.test_engine_port URL URL` prints the table
of `docs/results/engine-port.md` for a gateway and an engine that run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from prfaas.gateway.openai.fields import (
    DROPPED_FIELDS,
    REFUSED,
    ChatFields,
    CompletionFields,
    types_of,
)
from tests.live.conftest import Live

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUMBERS = (0, 1, 2, -1, 5.0, 10.0, 0.7, 2**40, 2**63, 1e20)
TEXTS = ("", "1", "5", "5.0", " 5 ", "5_0", "0.7", "1e1", "true", "off", "null", "x", "inf")
OTHERS: tuple[Any, ...] = (None, True, False, [], [1], ["1"], [5.0], ["a"], {}, {"5": 1}, {"a": 1})
VALUES = (*OTHERS, *NUMBERS, *TEXTS)
FEW: tuple[Any, ...] = (None, True, 1, 0, "x", [], ["a"], {"a": 1})
STEERING = ("priority", "session_id", "mm_payload", "return_mm_kwargs", "watermarking", "unknown")
READ_BY_OTHERS = {"messages", "prompt", "model", "stream_options", "chat_template", "tools"}
"""They have forms of their own, below."""
VOLATILE = {"id", "created", "system_fingerprint", "kv_transfer_params", "prompt_tokens_details"}
AT_ONCE = 16
ROOM = 16384
PROMPTS: tuple[Any, ...] = (
    *([72.0, 73], [72, "73"], ["72", "73"], [[72.0], [73]], [True, 73], [[72], "a"], [1.5]),
    *("", [], [""], [[]], None, 5, {}, [None], "Hello", ["Hello", "you"]),
)
LENGTHS: tuple[tuple[int, Any], ...] = (
    *((ROOM - 14, 100), (ROOM - 14, "100"), (ROOM - 14, None), (ROOM - 14, ROOM + 1)),
    *((ROOM - 1, 16), (ROOM - 1, 1), (ROOM, 1), (100, 0)),
)
OPTIONS: tuple[Any, ...] = ({}, {"include_usage": 1}, {"include_usage": True}, 5, None, [])
HEADERS: tuple[dict[str, str], ...] = (
    *({"Authorization": "Bearer " + "x" * 9_000}, {"Authorization": "Bearer " + "x" * 60_000}),
    *({"Content-Type": "text/plain"}, {"Content-Type": "application/xml"}),
    *({"Content-Type": "application/json; charset=utf-8"}, {"Accept": "text/html"}),
)


@dataclass(frozen=True)
class Form:
    """A request in one of its forms."""

    path: str
    name: str
    value: Any
    body: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


def forms() -> Iterator[Form]:
    """All of them."""
    for path, fields in ((COMPLETIONS, CompletionFields), (CHAT, ChatFields)):
        for name in sorted(types_of(fields).keys() - READ_BY_OTHERS):
            for value in VALUES:
                # Without a limit an engine here takes minutes; `LENGTHS` has it near the end.
                if (name, value) != ("max_tokens", None):
                    yield Form(path, name, value, plain(path) | {name: value})
        for name in sorted({*DROPPED_FIELDS, *REFUSED, *STEERING, "cache_salt"}):
            for value in FEW:
                yield Form(path, name, value, plain(path) | {name: value})
        for num_chars, limit in LENGTHS:
            body = plain(path, "x" * (num_chars - 19 * (path == CHAT))) | {"max_tokens": limit}
            yield Form(path, f"max_tokens after {num_chars} tokens", limit, body)
            if path == CHAT:
                body = body | {"max_tokens": None, "max_completion_tokens": limit}
                yield Form(path, f"max_completion_tokens after {num_chars}", limit, body)
        for headers in HEADERS:
            said = {name: value[:40] for name, value in headers.items()}
            yield Form(path, "headers", said, plain(path), tuple(headers.items()))
        for name in ("?" + "a" * 9_000, "?" + "a" * 60_000, "/"):
            yield Form(path + name, "path", name[:9], plain(path))
        for options in OPTIONS:
            body = plain(path) | {"stream": True, "stream_options": options}
            yield Form(path, "stream_options", options, body)
    for prompt in PROMPTS:
        yield Form(COMPLETIONS, "prompt", prompt, plain(COMPLETIONS) | {"prompt": prompt})


def plain(path: str, text: str = "Hello there") -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
    if path == COMPLETIONS:
        return body | {"prompt": text}
    return body | {"messages": [{"role": "user", "content": text}]}


@dataclass(frozen=True)
class Answer:
    """What a server says to a form."""

    status: int
    text: str

    @property
    def content(self) -> Any:
        """The answer without what differs from one to the next."""
        if self.text.startswith(("data:", ":")):
            lines = self.text.splitlines()
            return [without(json.loads(each[6:])) for each in lines if each.startswith("data: {")]
        try:
            return without(json.loads(self.text))
        except ValueError:
            return self.text


def without(value: Any) -> Any:
    """A JSON value without volatile keys and nulls, its numbers rounded."""
    if isinstance(value, dict):
        kept = {key: without(each) for key, each in value.items() if key not in VOLATILE}
        return {key: each for key, each in kept.items() if each is not None}
    if isinstance(value, list):
        return [without(each) for each in value]
    return round(value, 2) if isinstance(value, float) else value


async def ask(http: aiohttp.ClientSession, url: str, form: Form) -> Answer:
    headers = {"Content-Type": "application/json"} | dict(form.headers)
    try:
        async with http.post(
            url + form.path, data=json.dumps(form.body).encode(), headers=headers
        ) as reply:
            return Answer(reply.status, await reply.text())
    except aiohttp.ClientError as error:
        # vLLM's server closes the connection where it fails.
        return Answer(0, type(error).__name__)


def is_random(form: Form) -> bool:
    """Return True if a form is sampled: two answers to it differ."""
    sampled = form.body.get("temperature")
    return sampled is None or float(sampled) > 0


def verdict(form: Form, engine: Answer, gateway: Answer) -> str:
    """The two answers side by side, in one word."""
    if engine.status == gateway.status == 200:
        if is_random(form):
            return "both answer"
        return "same" if engine.content == gateway.content else "DIFFERENT"
    if engine.status == 200:
        says_why = "gateway." in gateway.text or "not accepted from clients" in gateway.text
        return "refused by a setting" if says_why else "REFUSED"
    if gateway.status == 200:
        return "more"
    return "both refuse" if gateway.status < 500 or engine.status in (0, 500) else "FAILED"


async def compare(gateway: str, engine: str) -> list[tuple[Form, Answer, Answer]]:
    """Send every form to both."""
    places = asyncio.Semaphore(AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        async def one(form: Form) -> tuple[Form, Answer, Answer]:
            async with places:
                return form, await ask(http, engine, form), await ask(http, gateway, form)

        return await asyncio.gather(*map(one, forms()))


def table(compared: list[tuple[Form, Answer, Answer]]) -> str:
    """The forms by field: how many, and what came of them."""
    kinds = ("same", "both answer", "both refuse", "more", "refused by a setting")
    lines = [f"| field | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    found: dict[str, Counter[str]] = {}
    for form, engine, gateway in compared:
        path = form.path.partition("?")[0].rstrip("/")
        name = f"{'chat' if path == CHAT else 'completions'}: {form.name}"
        found.setdefault(name, Counter())[verdict(form, engine, gateway)] += 1
    for name, counts in found.items():
        lines.append(f"| {name} | {' | '.join(str(counts[kind] or '') for kind in kinds)} |")
    return "\n".join(lines)


async def test_the_gateway_takes_every_form_that_the_engine_takes(live: Live) -> None:
    compared = await compare(live.url, live.topology.engines["pd-engine"])
    assert len(compared) > 3000
    wrong = [
        (form.path[:24], form.name, form.value, engine.status, gateway.status, gateway.text[:200])
        for form, engine, gateway in compared
        if verdict(form, engine, gateway).isupper()
    ]
    assert not wrong, "\n".join(map(str, wrong[:20]))


if __name__ == "__main__":
    results = asyncio.run(compare(*sys.argv[1:]))
    print(Counter(verdict(*each) for each in results))
    for each in results:
        if (word := verdict(*each)).isupper():
            print(word, each[0].path[:24], each[0].name, each[0].value, each[1:], file=sys.stderr)
    print(table(results))
