"""Errors of real clients for requests that cannot be served."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.live.conftest import Live, document

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"max_tokens": -1}, 400, "-1"),
        ({"messages": [{"role": "user", "content": document(11000) * 2}]}, 400, "16384"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hello"}, 400, "messages"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": -5}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 9_000_000}]}, 413, ""),
    ],
)
async def test_errors_are_openais(
    live: Live, change: dict[str, Any], status: int, said: str
) -> None:
    url = f"{live.url}/v1/chat/completions"
    body = io.BytesIO(json.dumps(live.chat_body("Hello") | change).encode())
    async with live.http.post(url, data=body) as reply:
        assert reply.status == status, await reply.text()
        error = (await reply.json())["error"]
    assert said in error["message"]
    assert error["code"] == status
    assert error["type"]


async def test_malformed_json_is_a_400(live: Live) -> None:
    url = f"{live.url}/v1/chat/completions"
    async with live.http.post(url, data=b'{"model": ') as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["code"] == 400


async def test_the_gateway_still_serves(live: Live) -> None:
    answer, _ = await live.chat("Still there?")
    assert answer["choices"][0]["message"]["content"]
